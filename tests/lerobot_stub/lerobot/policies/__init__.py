from lerobot.policies import two_layers  # noqa: F401
