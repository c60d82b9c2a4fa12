"""What a model must not contain when each client's update has to depend on that client alone."""

from __future__ import annotations

from torch import nn

from fedveil.errors import UserError
from fedveil.models.layers import group_count

_BATCH = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def refuse_batch_norm(model: nn.Module) -> None:
    """Raise `UserError` at the first layer that mixes examples or keeps statistics of them.

    What passes has no batch norm of any kind and no instance norm with running statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BATCH):
            raise UserError(_message(name, module, "mixes the examples of a batch"))
        if isinstance(module, _INSTANCE) and module.track_running_stats:
            raise UserError(_message(name, module, "keeps running statistics of the examples"))


def dropout_layers(model: nn.Module) -> list[str]:
    """The dotted names of the dropout layers; they draw random numbers in training.

    >>> dropout_layers(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    ['1']
    """
    return [name for name, module in model.named_modules() if isinstance(module, _DROPOUT)]


def _message(name: str, module: nn.Module, fault: str) -> str:
    channels = int(getattr(module, "num_features", 0))
    # A lazy layer does not know its channels before its first input.
    numbers = f"{group_count(channels)}, {channels}" if channels else "groups, channels"
    where = f"Layer '{name}'" if name else "The model itself"
    return (
        f"{where} is a {type(module).__name__}, which {fault}, so no bound on one client's or "
        f"example's influence would hold; replace it by torch.nn.GroupNorm({numbers})."
    )


def refuse_unfit(module: nn.Module) -> None:
    """Refuse layers whose answer depends on other examples, on chance, or on a first call."""
    refuse_batch_norm(module)
    if any(nn.parameter.is_lazy(leaf) for leaf in module.parameters()):
        raise UserError(
            f"{type(module).__name__} has a lazy layer, which does not know its size yet; "
            "call the module once, or give the layer its size."
        )
    if dropped := dropout_layers(module):
        raise UserError(
            f"Layer '{dropped[0]}' is a dropout layer, whose randomness would not be "
            "reproducible over clients; leave it out (the noise of privacy regularizes already)."
        )
