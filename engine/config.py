from dataclasses import field
def option(default, help, **limits):
    from typing import Any
    return field(default=default, metadata={"help": help, **limits})
def section(cls):
    return field(default_factory=cls)
