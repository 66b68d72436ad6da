"""How often each expert of each layer was asked, since the layout stands: what a measured placement is made of.

The counts begin anew with each layout, so that they describe the traffic that there is now; those of the layout
before are kept until there are any. Counted are tokens as they were routed, wherever their expert is.
"""

from __future__ import annotations

import numpy as np

from labkit.engine.bringup import SwitchRefused
from labkit.engine.settings import EngineSettings
from labkit.layout import (
    AnyLayout,
    Deployment,
    LayerPlacements,
    Layout,
    imbalance,
    place_experts,
    plain_placement,
    pools_of,
)
from labkit.measure.experts import ExpertStep, Ints
from labkit.model.spec import ModelSpec


class ExpertLoad:
    """spec: of a model with experts."""

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.moe is not None
        self.spec, self.num_experts = spec, spec.moe.num_experts
        self._counts, self._before = self._zeros(), self._zeros()
        self._layout = Layout()
        self._placements: LayerPlacements = ()

    def _zeros(self) -> Ints:
        return np.zeros((self.spec.num_layers, self.num_experts), np.int64)

    def begin(self, layout: AnyLayout, placements: LayerPlacements) -> None:
        """Another layout stands; of several pools, the imbalance is told as the first would have it."""
        self._layout, self._placements = pools_of(layout)[0].layout, placements
        if self._counts.any():
            self._before = self._counts
            self._counts = self._zeros()

    def add(self, step: ExpertStep) -> None:
        for layer, tokens in step.tokens.items():
            self._counts[layer] += tokens

    @property
    def counts(self) -> Ints:
        """[layers, experts]: tokens under this layout, or under the last one that had any."""
        return self._counts if self._counts.any() else self._before

    def placements(self, layout: Layout, num_copies: int) -> LayerPlacements:
        """For every MoE layer the experts spread by what was measured. Raises ValueError without a measurement."""
        counts = self.counts
        if not counts.any():
            raise ValueError(
                "expert_placement is 'measured', and no token has been routed yet: send some requests first, "
                "or take 'plain'."
            )
        return tuple(
            place_experts(counts[layer].tolist(), layout.ep, num_copies) if self.spec.is_moe_layer(layer) else ()
            for layer in range(self.spec.num_layers)
        )

    def describe(self) -> dict[str, object]:
        """As the page shows it: tokens by layer and expert, and how uneven ranks are, plain and as placed."""
        layers = [layer for layer in range(self.spec.num_layers) if self.spec.is_moe_layer(layer)]
        plain, placements = plain_placement(self.num_experts, self._layout.ep), self._placements
        loads = {layer: self.counts[layer].tolist() for layer in layers}
        placed = {layer: placements[layer] if placements else plain for layer in layers}
        return {
            "layers": layers,
            "tokens": [loads[layer] for layer in layers],
            "placements": [[list(experts) for experts in placed[layer]] for layer in layers],
            "imbalance": [imbalance(placed[layer], loads[layer]) for layer in layers],
            "plain_imbalance": [imbalance(plain, loads[layer]) for layer in layers],
        }


def placements_for(load: ExpertLoad | None, settings: EngineSettings) -> LayerPlacements:
    """What `settings` asks for; () is plain order, and all there is to say when experts are cut by tp (ep 1).

    Raises SwitchRefused with a sentence for what cannot be had.
    """
    if settings.expert_placement == "plain" and not settings.expert_capacity:
        return ()
    if load is None:
        raise SwitchRefused("expert_placement and expert_capacity are for models with experts; this one has none.")
    if settings.expert_placement == "plain":
        return ()
    if isinstance(settings.layout, Deployment):
        raise SwitchRefused(
            f"expert_placement is 'measured', which is for one layout, and {settings.layout} are several pools: "
            f"take 'plain'."
        )
    if settings.layout.ep == 1:
        return ()
    try:
        return load.placements(settings.layout, settings.expert_copies)
    except ValueError as error:
        raise SwitchRefused(str(error)) from error
