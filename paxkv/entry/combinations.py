"""Policies that cannot work together, whatever the sizes of the run."""

from collections.abc import Sequence

from paxkv.cache.groups import LayerGroup
from paxkv.config import Parts
from paxkv.policies.admission import Guaranteed


def why_not_together(
    parts: Parts, groups: Sequence[LayerGroup], *, prefix_caching: bool
) -> list[str]:
    """Return what speaks against the policies of a run, with the overrides that fix it."""
    return [
        *_contiguous_problems(parts, groups, prefix_caching),
        *_never_problems(parts),
        *_displacing_problems(parts),
    ]


def _contiguous_problems(
    parts: Parts, groups: Sequence[LayerGroup], prefix_caching: bool
) -> list[str]:
    if not parts.allocator.contiguous:
        return []
    name = type(parts.allocator).__name__
    problems = []
    if prefix_caching:
        problems.append(
            f"allocator={name}, prefix=on: a request whose blocks lie side by side cannot share "
            "any. Try prefix=off, or allocator=paged."
        )
    if any(group.span.window is not None for group in groups):
        problems.append(
            f"allocator={name}: blocks are reserved until a request ends, but layers with a window "
            "give theirs back. Try allocator=paged, or a model without windows and window=full."
        )
    return problems


def _never_problems(parts: Parts) -> list[str]:
    if parts.preempt.preempts:
        return []
    problems = []
    guaranteed = isinstance(parts.admit, Guaranteed)
    if not guaranteed and not parts.allocator.contiguous:
        problems.append(
            "preempt=none: without preemption each request needs all its blocks from the start. "
            "Try admit=guaranteed, or preempt=recompute."
        )
    if not guaranteed and parts.tenants.lends:
        problems.append(
            "preempt=none, tenants=file: what a tenant lends of its reservation is taken back by "
            "preemption. Try admit=guaranteed, or preempt=recompute."
        )
    return problems


def _displacing_problems(parts: Parts) -> list[str]:
    """Return a problem where running requests should make way, and none ever may."""
    if not parts.schedule.may_displace:
        return []
    if not parts.preempt.preempts:
        who, instead = "preempt=none", "preempt=recompute"
    elif isinstance(parts.admit, Guaranteed):
        who, instead = "admit=guaranteed", "admit=full_prompt"
    else:
        return []
    return [
        f"{who}, schedule.preempt_to_admit=true: nobody could make way. Try "
        f"schedule.preempt_to_admit=false, or {instead}."
    ]
