from types import SimpleNamespace


class ACTConfig(SimpleNamespace):
    type = "act"
