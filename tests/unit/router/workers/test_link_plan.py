from tandem.router.workers.link_plan import MAX_ALL, NUM_PICKS, LinkPlan


def alike(num_workers: int) -> dict[str, str]:
    return {f"both-{number}": "both" for number in range(num_workers)}


def apart(num_prefill: int, num_decode: int) -> dict[str, str]:
    prefill = {f"prefill-{number}": "prefill" for number in range(num_prefill)}
    return prefill | {f"decode-{number}": "decode" for number in range(num_decode)}


def num_links(roles: dict[str, str]) -> list[int]:
    plan = LinkPlan(roles)
    return [len(found) for name in roles if (found := plan.receivers_of(name))]


def test_small_clusters_link_all_pairs() -> None:
    for roles in (alike(MAX_ALL + 1), apart(MAX_ALL, 500), apart(500, MAX_ALL), {}):
        plan = LinkPlan(roles)
        assert plan.receivers_of(next(iter(roles), "")) is None and plan.senders_of("decode-0") is None


def test_links_of_a_worker_do_not_grow_with_the_cluster() -> None:
    for roles in (alike(300), alike(1000), apart(500, 500), apart(150, 150)):
        counts = num_links(roles)
        assert sum(counts) / len(counts) < 2 * NUM_PICKS
        assert min(counts) > NUM_PICKS / 2 and max(counts) < 4 * NUM_PICKS


def test_few_senders_reach_every_receiver() -> None:
    roles = apart(MAX_ALL + 1, 900)
    plan = LinkPlan(roles)
    for name in (name for name, role in roles.items() if role == "decode"):
        senders = plan.senders_of(name)
        assert senders is not None and len(senders) > NUM_PICKS / 2
        assert all(name in (plan.receivers_of(sender) or ()) for sender in senders)
    assert plan.receivers_of("decode-0") == set() and plan.senders_of("prefill-0") == set()


def test_a_new_worker_moves_few_links() -> None:
    for roles, name, role in ((alike(300), "both-300", "both"), (apart(200, 200), "decode-200", "decode")):
        before, after = LinkPlan(roles), LinkPlan({**roles, name: role})
        changed = sum(len((before.receivers_of(w) or set()) ^ (after.receivers_of(w) or set())) for w in roles)
        assert changed < 8 * NUM_PICKS
        assert name in after and name not in before


def test_workers_without_links_take_no_place() -> None:
    plan = LinkPlan(apart(100, 100) | alike(100))
    assert plan.receivers_of("both-0") == set()
    assert not any("both" in name for name in plan.receivers_of("prefill-0") or ())
