"""As much of LeRobot's package as tasks/robots/lerobot.py uses, with two small policies, for a machine without it."""
