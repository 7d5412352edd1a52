"""The Action Chunking Transformer (Zhao et al., RSS 2023): pictures and joint angles -> actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import normal_quantiles, sine_code
from models.resnet import DEPTHS, ResNet

STATE = "observation.state"
ENVIRONMENT = "observation.environment_state"
ACTION = "action"
PADDED = "action_is_pad"

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


@dataclass(frozen=True)
class ACTConfig:
    """Hyper-parameters, with the names and defaults of LeRobot's config.json.

    Raises ValueError for values that do not fit together.

    chunk_size       actions that are predicted at once
    n_action_steps   number of actions to execute before the next prediction
    kl_weight        weight of the divergence of the latent from the standard normal, beside the
                     mean absolute error
    n_decoder_layers 1, as in the published code, which used only the first of seven layers
    """

    chunk_size: int = 100
    n_action_steps: int = 100
    vision_backbone: str = "resnet18"
    replace_final_stride_with_dilation: bool = False
    pre_norm: bool = False
    dim_model: int = 512
    n_heads: int = 8
    dim_feedforward: int = 3200
    feedforward_activation: str = "relu"
    n_encoder_layers: int = 4
    n_decoder_layers: int = 1
    use_vae: bool = True
    latent_dim: int = 32
    n_vae_encoder_layers: int = 4
    dropout: float = 0.1
    kl_weight: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} {getattr(self, field.name)} must be at least 1")
        if self.dim_model % self.n_heads or self.dim_model % 4:
            raise ValueError(
                f"dim_model {self.dim_model} must be a multiple of 4 and of n_heads {self.n_heads}"
            )
        if self.n_action_steps > self.chunk_size:
            raise ValueError(
                f"n_action_steps {self.n_action_steps} must be at most chunk_size {self.chunk_size}"
            )
        if self.vision_backbone not in DEPTHS:
            raise ValueError(
                f"vision_backbone {self.vision_backbone!r} must be one of {', '.join(DEPTHS)}"
            )
        if self.feedforward_activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"feedforward_activation {self.feedforward_activation!r} must be one of {known}"
            )


class Attention(nn.Module):
    """Queries (B, Q, W), keys and values (B, K, W) -> (B, Q, W), in `heads` heads.

    The parameters have the names and shapes of nn.MultiheadAttention. nn.MultiheadAttention runs
    different code in evaluation and training, and by default keeps the weights of every pair of
    tokens.
    """

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return (B, Q, W).

        mask  (B, K) bool, True for keys to attend to; None = all keys
        """
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            # (B, H, L, W / H)
            F.linear(x, weight, bias).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        where = None if mask is None else mask[:, None, None]  # (B, 1, 1, K)
        mixed = F.scaled_dot_product_attention(
            q, k, v, where, self.dropout if self.training else 0.0
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Base of encoder and decoder layers: the feed-forward part, and the residual connection."""

    def __init__(self, config: ACTConfig):
        super().__init__()
        width = config.dim_model
        self.pre_norm = config.pre_norm
        self.activation = ACTIVATIONS[config.feedforward_activation]
        self.self_attn = Attention(width, config.n_heads, config.dropout)
        self.linear1 = nn.Linear(width, config.dim_feedforward)
        self.linear2 = nn.Linear(config.dim_feedforward, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)

    def residual(self, x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x plus a branch of x, with the norm before or after."""
        if self.pre_norm:
            return x + self.dropout(branch(norm(x)))
        return norm(x + self.dropout(branch(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class EncoderLayer(Layer):
    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        # As in DETR (Carion et al., ECCV 2020), positions are added to the queries and keys of
        # every layer, never to values.
        x = self.residual(
            x, self.norm1, lambda x: self.self_attn(x + positions, x + positions, x, mask)
        )
        return self.residual(x, self.norm2, self.feed_forward)


class DecoderLayer(Layer):
    def __init__(self, config: ACTConfig):
        super().__init__(config)
        self.multihead_attn = Attention(config.dim_model, config.n_heads, config.dropout)
        self.norm3 = nn.LayerNorm(config.dim_model)

    def forward(self, x: Tensor, positions: Tensor, memory: Tensor, keys: Tensor) -> Tensor:
        x = self.residual(x, self.norm1, lambda x: self.self_attn(x + positions, x + positions, x))
        x = self.residual(x, self.norm2, lambda x: self.multihead_attn(x + positions, keys, memory))
        return self.residual(x, self.norm3, self.feed_forward)


class Encoder(nn.Module):
    """Tokens (B, L, W) and positions (1 or B, L, W) -> (B, L, W).

    mask  (B, L) bool, True for real tokens
    """

    def __init__(self, config: ACTConfig, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(depth))
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.norm(x)


class Decoder(nn.Module):
    """Queries' positions (T, W), memory (B, L, W) and memory's positions (1, L, W) -> (B, T, W)."""

    def __init__(self, config: ACTConfig):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_decoder_layers))
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(self, queries: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        # A query has no content, only a position.
        x = torch.zeros_like(queries).expand(memory.shape[0], -1, -1)
        keys = memory + positions
        for layer in self.layers:
            x = layer(x, queries, memory, keys)
        return self.norm(x)


def grid_positions(features: Tensor, width: int) -> Tensor:
    """Return (1, H * W, width) for features (B, C, H, W): the sine code of row and column.

    Rows and columns run up to 2 pi: the relative positions of DETR (Carion et al., ECCV 2020) with
    DETR's 1e-6. The code of a relative position does not depend on the size of the picture.
    """
    rows, columns = (
        sine_code(
            torch.arange(1, n + 1, device=features.device) * (2 * torch.pi / (n + 1e-6)), width // 2
        )
        for n in features.shape[2:]
    )
    grid = torch.cat(
        [rows[:, None].expand(-1, len(columns), -1), columns.expand(len(rows), -1, -1)], 2
    )
    return grid.flatten(0, 1)[None]


class ACT(nn.Module):
    """A conditional variational auto-encoder of action chunks. The decoder is the policy.

    `net(inputs, draws)` trains and `net.sample(inputs)` predicts. `inputs` is normalised and
    contains, with the batch as the leading axis: the state (B, S), the environment's state (B, E),
    and every camera (B, 3, H, W), of any size; for training also "action" (B, T, A) and
    "action_is_pad" (B, T) bool, with T = chunk_size.

    The names of parameters and buffers are the names in LeRobot's checkpoints, without the leading
    `model.`. Every parameter has a gradient after a backward pass. Raises ValueError without
    inputs.

    state_dim   S of "observation.state"; 0 = none
    env_dim     E of "observation.environment_state"; 0 = none
    action_dim  A
    cameras     names of the pictures, such as "observation.images.top", in the order of the tokens
    num_draws   uniform draws in [0, 1) per training sample, one for each latent dimension
    num_noise   uniform draws per action: 0
    penalty     the weight of "kl" in the loss
    """

    constant_buffers = ("vae_encoder_pos_enc",)

    def __init__(
        self, config: ACTConfig, state_dim: int, env_dim: int, action_dim: int, cameras: list[str]
    ):
        super().__init__()
        if not (state_dim or env_dim or cameras):
            raise ValueError("a policy needs a state, an environment state or a camera to look at")
        width, latent = config.dim_model, config.latent_dim
        self.config, self.cameras = config, list(cameras)
        self.vectors = [name for name, dim in ((STATE, state_dim), (ENVIRONMENT, env_dim)) if dim]
        self.num_draws, self.num_noise = latent if config.use_vae else 0, 0
        self.penalty = config.kl_weight if config.use_vae else 0.0
        if config.use_vae:
            self.vae_encoder = Encoder(config, config.n_vae_encoder_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if state_dim:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state_dim, width)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * latent)
            num_tokens = 1 + bool(state_dim) + config.chunk_size
            # Persistent, because LeRobot's checkpoints contain the code.
            self.register_buffer(
                "vae_encoder_pos_enc", sine_code(torch.arange(num_tokens), width)[None]
            )
            self.normal = normal_quantiles()
        if cameras:
            self.backbone = ResNet(
                config.vision_backbone, config.replace_final_stride_with_dilation
            )
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.num_features, width, 1)
        self.encoder = Encoder(config, config.n_encoder_layers)
        self.decoder = Decoder(config)
        if state_dim:
            self.encoder_robot_state_input_proj = nn.Linear(state_dim, width)
        if env_dim:
            self.encoder_env_state_input_proj = nn.Linear(env_dim, width)
        self.encoder_latent_input_proj = nn.Linear(latent, width)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + len(self.vectors), width)
        self.decoder_pos_embed = nn.Embedding(config.chunk_size, width)
        self.action_head = nn.Linear(width, action_dim)
        for part in (self.encoder, self.decoder):
            for parameter in part.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)

    def forward(self, inputs: dict[str, Tensor], draws: Tensor) -> dict[str, Tensor]:
        """Return the sums of a training batch.

        The divisor of the sums is the weight of the global batch.

        error  (B,) the absolute error, summed over unpadded steps and the dimensions of an action
        kl     (B,) the divergence of the latent from the standard normal, summed over dimensions;
               only with the VAE
        """
        actions, padded = inputs[ACTION], inputs[PADDED]
        sums = {}
        latent = self.no_latent(actions)
        if self.config.use_vae:
            mean, log_var = self.posterior(inputs)
            latent = mean + (log_var / 2).exp() * self.normal(draws)
            # Kingma & Welling, ICLR 2014, appendix B.
            sums["kl"] = (mean.square() + log_var.exp() - log_var - 1).sum(1) / 2
        error = (self.decode(inputs, latent) - actions).abs().sum(2)  # (B, T)
        return sums | {"error": error.masked_fill(padded, 0).sum(1)}

    @torch.no_grad()
    def sample(self, inputs: dict[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """Return the chunk (B, T, A) in normalised units, at the mean of the latent's prior.

        `draws` are not used.
        """
        return self.decode(inputs, self.no_latent(next(iter(inputs.values()))))

    def no_latent(self, like: Tensor) -> Tensor:
        """Return zeros (B, latent_dim), the mean of the prior."""
        # `shape`, because len() is a constant in an exported model. `Decoder` does the same.
        size = like.shape[0], self.config.latent_dim
        return torch.zeros(size, dtype=self.action_head.weight.dtype, device=like.device)

    def posterior(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance, each (B, latent_dim), of the latent given the actions."""
        actions, padded = inputs[ACTION], inputs[PADDED]
        tokens = [self.vae_encoder_cls_embed.weight.expand(len(actions), 1, -1)]
        if STATE in self.vectors:
            tokens.append(self.vae_encoder_robot_state_input_proj(inputs[STATE])[:, None])
        counts = F.pad(~padded, (len(tokens), 0), value=True)  # (B, L)
        tokens.append(self.vae_encoder_action_input_proj(actions))
        x = self.vae_encoder(torch.cat(tokens, 1), self.vae_encoder_pos_enc, counts)
        # In the precision of the parameters: exp() of autocast's bfloat16 would lose digits of the
        # divergence.
        parts = self.vae_encoder_latent_output_proj(x[:, 0]).to(self.action_head.weight.dtype)
        mean, log_var = parts.chunk(2, 1)
        return mean, log_var

    def decode(self, inputs: dict[str, Tensor], latent: Tensor) -> Tensor:
        """Return actions (B, T, A) for observations and a latent (B, latent_dim)."""
        projections = {
            STATE: "encoder_robot_state_input_proj",
            ENVIRONMENT: "encoder_env_state_input_proj",
        }
        vectors = [self.encoder_latent_input_proj(latent)]
        vectors += [getattr(self, projections[name])(inputs[name]) for name in self.vectors]
        tokens = [torch.stack(vectors, 1)]
        positions = [self.encoder_1d_feature_pos_embed.weight[None]]
        for name in self.cameras:
            # (B, W, H / 32, W / 32)
            features = self.encoder_img_feat_input_proj(self.backbone(inputs[name]))
            tokens.append(features.flatten(2).transpose(1, 2))
            positions.append(grid_positions(features, self.config.dim_model))
        where = torch.cat(positions, 1)  # (1, L, W)
        memory = self.encoder(torch.cat(tokens, 1), where)
        return self.action_head(self.decoder(self.decoder_pos_embed.weight, memory, where))


class TemporalEnsemble:
    """Blends the chunks of the last steps into one action (algorithm 2 of Zhao et al., RSS 2023).

    Predictions for the same step have the weights exp(-coefficient * i), with i = 0 for the oldest:
    a positive coefficient prefers older predictions, a negative coefficient newer predictions. An
    ensemble serves one trial, or one batch of trials.
    """

    def __init__(self, coefficient: float):
        self.coefficient = coefficient
        self.total = torch.empty(0)

    def __call__(self, chunk: Tensor) -> Tensor:
        """Return the action (B, A) to execute now.

        `chunk` has the current predictions (B, T, A).
        """
        if not self.total.numel():
            self.total = torch.zeros_like(chunk)
            self.weight = torch.zeros_like(chunk[..., :1])  # (B, T, 1)
            self.count = torch.zeros_like(self.weight)
        weight = torch.exp(-self.coefficient * self.count)
        self.total = self.total + weight * chunk
        self.weight = self.weight + weight
        self.count = self.count + 1
        action = self.total[:, 0] / self.weight[:, 0]
        self.total, self.weight, self.count = (
            F.pad(kept[:, 1:], (0, 0, 0, 1)) for kept in (self.total, self.weight, self.count)
        )
        return action
