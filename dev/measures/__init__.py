"""The measurements of `dev/house.py`."""
