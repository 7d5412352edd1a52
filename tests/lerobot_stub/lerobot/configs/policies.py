from dataclasses import dataclass, field


@dataclass
class PreTrainedConfig:
    n_obs_steps: int = 1
    input_features: dict | None = field(default_factory=dict)
    output_features: dict | None = field(default_factory=dict)
    device: str | None = None
    push_to_hub: bool = True
    pretrained_path: str | None = None
    known = {}

    @classmethod
    def get_known_choices(cls):
        return cls.known
