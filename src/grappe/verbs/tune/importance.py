"""Importance: how much each field of a study matters for being among the good trials."""

from __future__ import annotations

import warnings

from grappe.verbs.tune.sampler import as_optuna
from grappe.verbs.tune.space import Space, holds
from grappe.verbs.tune.study import Study

FEWEST = 8
"""Complete trials, below which nothing can be said."""


def importance(study: Study, space: Space) -> dict[str, float]:
    """The share of each field, by PED-ANOVA (Watanabe et al. 2023); {} without Optuna, or of too few trials."""
    complete = [
        one
        for one in study.trials
        if one.state == "complete" and all(holds(axis, one.fields[name]) for name, axis in space.items())
    ]
    if len(complete) < FEWEST or len(space) < 2:
        return {}
    try:
        import optuna
    except ImportError:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is new
        found = optuna.importance.get_param_importances(
            as_optuna(space, complete, maximize=study.search.maximize),
            evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
        )
    return {name: float(found.get(name, 0.0)) for name in space}
