import math

import pytest

from paxkv.errors import ConfigError
from paxkv.policies.schedule import Continuous, Static
from paxkv.policies.view import QueueHead


def in_order(policy, requests):
    return [request.request_id for request in sorted(requests, key=policy.key)]


@pytest.mark.parametrize("batching", [Continuous, Static])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", "abc"), ("vtc", "abc"), ("priority", "bca"), ("sjf", "cab")],
)
def test_orders_of_a_queue(waiting, batching, policy, expected):
    requests = [
        waiting("c", arrival_s=3.0, priority=1, prompt_len=10, max_tokens=5),
        waiting("a", arrival_s=1.0, priority=2, prompt_len=10, max_tokens=500),
        waiting("b", arrival_s=2.0, priority=0, prompt_len=1000, max_tokens=1),
    ]
    assert in_order(batching(policy=policy), requests) == list(expected)


@pytest.mark.parametrize("policy", ["priority", "sjf"])
def test_equals_go_by_arrival(waiting, policy):
    requests = [waiting("late", arrival_s=1.0), waiting("early", arrival_s=0.5)]
    for ageing_s in (None, math.inf):
        ordered = in_order(Continuous(policy=policy, ageing_s=ageing_s), requests)
        assert ordered == ["early", "late"]


@pytest.mark.parametrize(
    ("policy", "ageing_s", "worth_s"),
    [
        ("priority", None, 60.0),
        ("priority", 5.0, 5.0),
        ("sjf", None, 0.02),
        ("sjf", 1.0, 1.0),
    ],
)
def test_waiting_is_worth_a_level(waiting, policy, ageing_s, worth_s):
    """So nothing starves: who waits gets ahead of later and better ones."""
    order = Continuous(policy=policy, ageing_s=ageing_s)
    worse = waiting("worse", priority=3, max_tokens=13)
    for arrival_s, expected in ((3 * worth_s * 0.99, "better"), (3 * worth_s * 1.01, "worse")):
        better = waiting("better", priority=0, max_tokens=10, arrival_s=arrival_s)
        assert in_order(order, [worse, better])[0] == expected


@pytest.mark.parametrize("policy", ["priority", "sjf"])
def test_without_ageing_the_order_is_strict(waiting, policy):
    order = Continuous(policy=policy, ageing_s=math.inf)
    worse = waiting("worse", priority=1, max_tokens=11)
    better = waiting("better", priority=0, max_tokens=10, arrival_s=1e9)
    assert in_order(order, [worse, better]) == ["better", "worse"]


def heads(policy, *requests_and_service):
    """Return the heads of queues, in this order, with keys that end in the order of submission."""
    return [
        QueueHead(request, (*policy.key(request), number), service)
        for number, (request, service) in enumerate(requests_and_service)
    ]


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", 1), ("priority", 0), ("sjf", 1), ("vtc", 2)]
)
def test_which_tenant_is_next(waiting, policy, expected):
    order = Continuous(policy=policy)
    offered = heads(
        order,
        (waiting(priority=0, arrival_s=2.0, max_tokens=90), 500.0),
        (waiting(priority=3, arrival_s=1.0, max_tokens=5), 300.0),
        (waiting(priority=5, arrival_s=3.0, max_tokens=900), 299.5),
    )
    assert order.choose(offered) == expected


def test_equally_served_tenants_go_by_arrival(waiting):
    order = Continuous(policy="vtc")
    offered = heads(order, (waiting(arrival_s=2.0), 7.0), (waiting(arrival_s=1.0), 7.0))
    assert order.choose(offered) == 1


def test_a_backlogged_tenant_gets_the_share_of_its_weight(waiting):
    """Two tenants that always wait: one with weight 3 is served three times as much."""
    order = Continuous(policy="vtc")
    weights, service, served = (3.0, 1.0), [0.0, 0.0], [0, 0]
    for _ in range(400):
        chosen = order.choose(heads(order, *((waiting(), value) for value in service)))
        service[chosen] += order.charge(10, 20) / weights[chosen]
        served[chosen] += 1
    assert served[0] / served[1] == pytest.approx(3.0, rel=0.02)


def test_what_service_is_charged():
    assert Continuous(policy="vtc").charge(10, 3) == 16.0
    assert Continuous(policy="vtc", input_weight=0.5, output_weight=4.0).charge(10, 3) == 17.0


def test_who_joins_a_batch():
    assert Continuous().joins(0)
    assert Continuous().joins(7)
    assert Static().joins(0)
    assert not Static().joins(1)


@pytest.mark.parametrize(
    ("arrived", "arrived_at_s", "runs", "displaced"),
    [
        (0, 10.0, 1, True),
        (1, 10.0, 1, False),  # equals never displace each other
        (2, 10.0, 1, False),
        (0, 70.0, 1, False),  # the running one has aged ahead of the arrival: 60 s a level
        (0, 70.0, 2, True),
    ],
)
def test_whom_a_more_urgent_arrival_displaces(
    waiting, running, arrived, arrived_at_s, runs, displaced
):
    policy = Continuous(policy="priority", preempt_to_admit=True)
    arrival = waiting(priority=arrived, arrival_s=arrived_at_s)
    assert policy.displaces(arrival, running(priority=runs, arrival_s=0.0)) is displaced


def test_an_equal_that_came_earlier_displaces_nobody(waiting, running):
    policy = Continuous(policy="priority", preempt_to_admit=True)
    assert not policy.displaces(waiting(priority=1), running(priority=1, arrival_s=500.0))


def test_two_requests_never_displace_each_other(waiting, running):
    policy = Continuous(policy="priority", preempt_to_admit=True)
    cases = [(priority, arrival) for priority in range(3) for arrival in (0.0, 50.0, 150.0)]
    for mine in cases:
        for theirs in cases:
            forth = policy.displaces(
                waiting(priority=mine[0], arrival_s=mine[1]),
                running(priority=theirs[0], arrival_s=theirs[1]),
            )
            back = policy.displaces(
                waiting(priority=theirs[0], arrival_s=theirs[1]),
                running(priority=mine[0], arrival_s=mine[1]),
            )
            assert not (forth and back)


@pytest.mark.parametrize(
    "policy", [Continuous(policy="priority"), Continuous(), Static(policy="priority")]
)
def test_priority_alone_displaces_nobody(waiting, running, policy):
    assert not policy.displaces(waiting(priority=0), running(priority=9))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "lifo"}, r"schedule\.policy=lifo.*fcfs, priority, sjf, vtc"),
        ({"policy": "sjf", "ageing_s": 0}, r"ageing_s=0: must be seconds > 0.*ageing_s=null"),
        ({"policy": "sjf", "ageing_s": -1.0}, r"ageing_s=-1\.0: must be seconds"),
        ({"policy": "sjf", "ageing_s": math.nan}, r"ageing_s=nan: must be seconds"),
        ({"policy": "sjf", "ageing_s": "slow"}, r"ageing_s=slow: must be seconds"),
        ({"policy": "fcfs", "ageing_s": 5.0}, r"ageing_s=5\.0: .*fcfs.*policy=priority or sjf"),
        ({"policy": "vtc", "ageing_s": math.inf}, r"ageing_s=inf: .*vtc lets nothing starve"),
        ({"policy": "vtc", "input_weight": -1.0}, r"input_weight=-1\.0: must be a finite.*=1\.0"),
        ({"policy": "vtc", "output_weight": math.nan}, r"output_weight=nan: must be.*=2\.0"),
        ({"policy": "vtc", "output_weight": math.inf}, r"output_weight=inf: must be"),
        (
            {"policy": "vtc", "input_weight": 0, "output_weight": 0},
            r"input_weight=0: with schedule\.output_weight=0 no service",
        ),
        ({"output_weight": 3.0}, r"output_weight=3\.0: .*policy=fcfs.*Try.*policy=vtc"),
    ],
)
@pytest.mark.parametrize("batching", [Continuous, Static])
def test_refusals_of_an_order(batching, given, message):
    with pytest.raises(ConfigError, match=message) as error:
        batching(**given)
    assert all("Try schedule." in p or "Choose one of" in p for p in error.value.problems)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "vtc"])
def test_only_priority_knows_a_more_urgent_class(policy):
    with pytest.raises(ConfigError, match=rf"preempt_to_admit=True: .*{policy}.*policy=priority"):
        Continuous(policy=policy, preempt_to_admit=True)


def test_preempt_to_admit_is_true_or_false():
    with pytest.raises(ConfigError, match=r"preempt_to_admit=1: must be true or false"):
        Continuous(policy="priority", preempt_to_admit=1)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        Continuous(ageing_s=5.0, output_weight=-1.0, preempt_to_admit=True)
    assert len(error.value.problems) == 3
