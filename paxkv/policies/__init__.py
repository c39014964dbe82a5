"""Memory policies: one file an axis, each policy a frozen dataclass with pure methods.

A policy sees read-only views and decides; the scheduler applies the decision and checks it, so a
policy that names a request or block it was not offered raises `InvariantError` and cannot corrupt
the pool. To add one, write a frozen dataclass with the methods of its axis (the `Protocol` in its
file) and point a YAML's `_target_` at it; nothing registers.

| axis | group | method | decides |
|---|---|---|---|
| admission | `admit` | `choose(view, need)` | may the next request start, and with which blocks |
| allocator | `allocator` | `reserve_tokens(...)` | block after block, or a run set aside on entry |
| eviction | `evict` | `choose(oldest_first, need_blocks)` | which cached blocks are dropped |
| preemption | `preempt` | `choose(victim, host)` | swap it out or recompute it later |
| schedule | `schedule` | `key(request)` | the order of a tenant's waiting requests |
| | | `choose(heads)` | which tenant's first request is considered next |
| | | `joins(num_running)` | may waiting requests join the batch in this step |
| | | `charge(prompt_tokens, output_tokens)` | what tokens count as service of a tenant |
| | | `displaces(waiting, running)` | must a running request make way for a waiting one |
| tenancy | `tenants` | `resolve(num_blocks)` | reservation, limit, weight, class of each tenant |
| victim | `victim` | `choose(candidates, need_blocks)` | which running request gives way |
| window | `window` | `choose(layer)` | which tokens a layer attends to, and so keeps |

What the views hold is in `view.py`. Policies keep no state: what they learn from is in the views.
"""
