"""Memory policies: one file an axis, each policy a frozen dataclass with pure methods.

A policy sees read-only views and decides; the scheduler applies the decision and checks it, so a
policy that names a request or block it was not offered raises `InvariantError` and cannot corrupt
the pool. To add one, write a frozen dataclass with the method of its axis and point a YAML's
`_target_` at it; nothing registers.

| axis | method | decides |
|---|---|---|
| admission | `choose(view, need)` | may the next waiting request start, and with how many blocks |
| schedule | `key(request)` | the order of the waiting queue |
| victim | `choose(candidates, need_blocks)` | which running request gives its blocks back |
| preemption | `choose(victim, host_free_blocks)` | swap it out or recompute it later |
| eviction | `choose(oldest_first, need_blocks)` | which cached blocks nobody uses are dropped |
"""
