"""Pooling models: their description (`pooling_config`), and arithmetic on their `vectors`. Pure, for every process."""
