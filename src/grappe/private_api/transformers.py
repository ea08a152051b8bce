"""Reads what a model of transformers says of its own parts; transformers itself is never imported here."""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import nn

from grappe.private_api import PrivateName

SEEN = "5.0 to 5.23"

USED = (
    PrivateName("transformers.PreTrainedModel", "_no_split_modules", SEEN),
    PrivateName("transformers.PreTrainedConfig", "_attn_implementation", SEEN),
)


def models(model: nn.Module) -> dict[str, Any]:
    """Returns the models of transformers in `model` by name, none inside another; "" is `model` itself."""
    # torchmetrics imports transformers; this part of it, which takes a second, only who has such a model.
    if (defined := sys.modules.get("transformers.modeling_utils")) is None:
        return {}
    kind = defined.PreTrainedModel
    outermost: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, kind) and not any(not outer or name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = module
    return outermost


def blocks(model: nn.Module) -> list[nn.Module]:
    """Lists the modules that must not be split, in order."""
    unsplit: list[nn.Module] = []
    inside: set[int] = set()
    for language_model in models(model).values():
        kinds = set(language_model._no_split_modules or ())
        for module in language_model.modules():
            if type(module).__name__ in kinds and id(module) not in inside:
                inside.update(id(part) for part in module.modules())
                unsplit.append(module)
    return unsplit


def tensor_styles(model: Any) -> dict[str, str]:
    """Returns transformers' word for how each module is split, by the module's name; empty: it has no plan."""
    plan = getattr(model, "tp_plan", None) or {}
    starred = {name: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name, _ in model.named_modules()}
    return {name: plan[pattern] for name, pattern in starred.items() if pattern in plan}


def pipeline_order(model: Any) -> list[str]:
    """Lists the names of the modules that a pipeline runs one after the other; empty: it has no plan."""
    plan = list(getattr(model, "pp_plan", None) or {})
    prefix = f"{model.base_model_prefix}."
    inner = [name for name in plan if name.startswith(prefix)]
    return [*inner, *(name for name in plan if name not in inner)]


def switch_off_cache(model: Any) -> None:
    """Lets the model return no keys and values of attention, which are for generation."""
    model.config.use_cache = False


def has_causal_sdpa(model: Any) -> bool:
    """Returns whether attention without a mask is causal, by torch's scaled_dot_product_attention."""
    causal = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    return model.config._attn_implementation == "sdpa" and causal == {True}
