"""Optional folders of functions. The core trains without the folders. At its import each folder
adds functions to the hooks of engine/hooks.py."""
