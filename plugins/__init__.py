"""Optional folders. The core trains without them; each adds functions to the hooks of
engine/hooks.py when it is imported."""
