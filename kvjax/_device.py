"""The device that everything is on unless somebody says otherwise."""

from typing import Any

import jax


def default_device() -> Any:
    """JAX's default device: the first of its platform, where only a platform was named."""
    chosen = jax.config.values["jax_default_device"]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def on_cpu() -> bool:
    """Whether that is a CPU."""
    return default_device().platform == "cpu"
