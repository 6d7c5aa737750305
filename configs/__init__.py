"""Serving profiles: one YAML file each, loaded by name (``moe --profile NAME``)."""
