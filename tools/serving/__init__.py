"""A trained model outside the lab: `translate.py --serve` and `--export`."""
