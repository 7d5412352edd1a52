"""Policies of LeRobot as small as their classes allow, with random weights: {type: words of a command line}.

Those that would download a backbone get one made here, in a folder of the test.
"""

import importlib
from types import SimpleNamespace

SPECIAL = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
HEADS = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def words_tokenizer(**options):
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<s>", "</s>", *SPECIAL.values(), "walk", "0", "1"]
    tokens = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **names, **options)


def diffusion(folder, patch):
    return [
        "policy.horizon=8 policy.n_action_steps=4 policy.down_dims=[16,32] policy.use_group_norm=true",
        "policy.diffusion_step_embed_dim=16 policy.spatial_softmax_num_keypoints=4 policy.num_train_timesteps=10",
    ]


def vqbet(folder, patch):
    return [
        "policy.n_obs_steps=2 policy.n_action_pred_token=2 policy.action_chunk_size=3 policy.crop_shape=null",
        "policy.spatial_softmax_num_keypoints=4 policy.n_vqvae_training_steps=2 policy.vqvae_n_embed=4",
        "policy.vqvae_embedding_dim=8 policy.vqvae_enc_hidden_dim=16 policy.gpt_input_dim=16 policy.gpt_output_dim=16",
        "policy.gpt_n_layer=1 policy.gpt_n_head=2 policy.gpt_hidden_dim=16 policy.dropout=0 policy.use_group_norm=true",
    ]


def multi_task_dit(folder, patch):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    folder = folder / "clip"  # its config asks for that name
    config = CLIPConfig(
        text_config=HEADS | {"num_hidden_layers": 1, "vocab_size": 32, "max_position_embeddings": 12},
        vision_config=HEADS | {"num_hidden_layers": 1, "image_size": 32, "patch_size": 16},
        projection_dim=16,
    )
    for part in (CLIPModel(config), words_tokenizer(), CLIPImageProcessor()):
        part.save_pretrained(folder)
    return [
        f"policy.vision_encoder_name={folder} policy.text_encoder_name={folder} policy.horizon=8",
        "policy.n_action_steps=4 policy.hidden_dim=16 policy.num_layers=1 policy.num_heads=2 policy.dropout=0",
        "policy.timestep_embed_dim=16 policy.tokenizer_max_length=8 policy.image_crop_shape=[32,32]",
        "policy.num_train_timesteps=10 policy.image_crop_is_random=false",
    ]


def smolvla(folder, patch):
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    tokenizer = words_tokenizer(extra_special_tokens=SPECIAL)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(folder)
    text = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    SmolVLMConfig(
        text_config=HEADS | text | {"vocab_size": 16},
        vision_config=HEADS | {"num_hidden_layers": 1, "image_size": 64, "patch_size": 16},
        scale_factor=2,
        image_token_id=4,
        pad_token_id=0,
    ).save_pretrained(folder)
    return [
        f"policy.vlm_model_name={folder} policy.num_vlm_layers=2 policy.resize_imgs_with_padding=[64,64]",
        "policy.chunk_size=6 policy.n_action_steps=6",
    ]


def _paligemma(patch, module):
    """LeRobot writes the sizes of PaliGemma and of its expert into its code."""
    modeling = importlib.import_module(module)
    small = SimpleNamespace(width=32, depth=2, mlp_dim=32, num_heads=8, num_kv_heads=1, head_dim=16)
    patch.setattr(modeling, "get_gemma_config", lambda variant: small)
    theirs = modeling.CONFIG_MAPPING

    vision = type(theirs["paligemma"]().vision_config)
    set_any = vision.__setattr__

    def set_small(self, name, value):
        set_any(self, name, 32 if name in ("projection_dim", "intermediate_size") else value)

    patch.setattr(vision, "__setattr__", set_small)

    def paligemma():
        config = theirs["paligemma"]()
        config.vision_config.hidden_size = 32
        config.vision_config.num_hidden_layers = 1
        config.vision_config.num_attention_heads = 2
        config.vision_config.patch_size = 16
        return config

    patch.setattr(modeling, "CONFIG_MAPPING", {"paligemma": paligemma, "gemma": theirs["gemma"]})


def _tokenizer_of_its_name(patch, name):
    """LeRobot writes the tokenizer's name into its code."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained

    def found(asked, *args, **options):
        return words_tokenizer() if asked == name else theirs(asked, *args, **options)

    patch.setattr(AutoTokenizer, "from_pretrained", found)


def pi0(folder, patch):
    _paligemma(patch, "lerobot.policies.pi0.modeling_pi0")
    _tokenizer_of_its_name(patch, "google/paligemma-3b-pt-224")
    return ["policy.chunk_size=6 policy.n_action_steps=6 policy.image_resolution=[32,32] policy.max_action_dim=8"]


def pi05(folder, patch):
    _paligemma(patch, "lerobot.policies.pi05.modeling_pi05")
    _tokenizer_of_its_name(patch, "google/paligemma-3b-pt-224")
    return [
        "policy.chunk_size=6 policy.n_action_steps=6 policy.image_resolution=[32,32] policy.max_action_dim=8",
        "policy.tokenizer_max_length=24",
    ]


def xvla(folder, patch):
    words_tokenizer().save_pretrained(folder)
    vision = "{embed_dim: [16, 16, 16, 16], depths: [1, 1, 1, 1], num_heads: [2, 2, 2, 2], num_groups: [2, 2, 2, 2]"
    vision += ", drop_path_rate: 0.0"
    text = "{d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16, decoder_ffn_dim: 16"
    heads = "encoder_attention_heads: 2, decoder_attention_heads: 2, vocab_size: 32, max_position_embeddings: 64"
    heads += ", dropout: 0.0"
    florence = f"{{vision_config: {vision}, projection_dim: 16}}, text_config: {text}, {heads}}}}}"
    return [
        f"policy.florence_config={florence}".replace(" ", "\0"),
        f"policy.tokenizer_name={folder} policy.tokenizer_max_length=8 policy.hidden_size=16 policy.depth=1",
        "policy.num_heads=2 policy.len_soft_prompts=2 policy.dim_time=8 policy.action_mode=auto policy.chunk_size=6",
        "policy.n_action_steps=6 policy.max_action_dim=8 policy.max_state_dim=8 policy.num_domains=2",
    ]


TINY = {each.__name__: each for each in (diffusion, vqbet, multi_task_dit, smolvla, pi0, pi05, xvla)}


def words_of(kind, folder, patch):
    lines = " ".join(TINY[kind](folder, patch)).split()
    return [f"policy.type={kind}", *(word.replace("\0", " ") for word in lines)]
