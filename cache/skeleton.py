"""Names and shapes of any transformers causal language model, from its class on the meta device.

Slow (importing transformers takes about ten seconds) and exact: used only for architectures that
`cache.families` does not know. A checkpoint whose tensors transformers would rename or fuse while
loading does not have these names; it is refused as `missing_tensor` rather than guessed at.
Never runs code from a checkpoint (`trust_remote_code` is off).
"""

from pathlib import Path

from cache.errors import UnsupportedModelError
from cache.families import ModelTensors, NamedShape

__all__ = ["tensors_of_skeleton"]


def tensors_of_skeleton(model_path: Path, architecture: str) -> ModelTensors:
    """The state dict of the transformers class that the config names.

    Raises:
        UnsupportedModelError: transformers has no such class, or cannot build it.
    """
    import torch
    import transformers

    cls = getattr(transformers, architecture, None)
    if cls is None or not architecture.endswith("ForCausalLM"):
        raise UnsupportedModelError(
            f"{architecture} is no causal language model of transformers {transformers.__version__}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        with torch.device("meta"):
            model = cls(config)
        model.tie_weights()
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise UnsupportedModelError(f"{architecture} cannot be built: {error}") from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    entries, ties = [], []
    for name, tensor in model.state_dict(keep_vars=True).items():
        kind = "parameter" if name in parameters else "buffer"
        entries.append(NamedShape(name, tuple(tensor.shape), kind))  # type: ignore[arg-type]
        if id(tensor) in first:
            ties.append((name, first[id(tensor)]))
        else:
            first[id(tensor)] = name
    return ModelTensors(tuple(entries), tuple(ties))
