"""The status page in a headless Chromium, on a real index with real publishers and a real pool.

``make test-pages`` installs what these need. All look at one fleet, whose load is there for as long as they run.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import IndexClient
from kvpool.discovery.audit_news import AuditFinding, AuditNews
from kvpool.discovery.worker import Publisher
from tests.pages.browser import NARROW, WIDE, expect, opened, page_of, violations
from tests.pages.live_fleet import MODEL, LiveFleet, live_fleet, seen
from tests.support.credentials import write_tokens
from tests.support.deadlines import eventually
from tests.support.fleets import a_worker, serving

BAD = "cd" * 16
HOSTILE = '<img src=x onerror="alert(1)">'

pytestmark = [
    pytest.mark.pages,
    pytest.mark.allow_leaks("the fleet's load goes on beside each of them, and ends with the last"),
]

NAMES = ("worker-a", "worker-b", "worker-c")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as one:
        yield one


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    with live_fleet(tmp_path_factory.mktemp("fleet"), NAMES) as one:
        assert seen(one, len(NAMES))
        one.workers["worker-c"].is_asleep = True
        one.workers["worker-c"].show()
        wrong = AuditFinding((BAD,), "record", HOSTILE, 0.9, time.time() - 240)
        one.workers["worker-a"].tell_audits(
            AuditNews("12" * 16, {"same": 499, "differs": 1}, (wrong,), host="gpu-1")
        )
        one.workers["worker-b"].tell_audits(
            AuditNews("34" * 16, {"differs": 3}, doubts=HOSTILE, host=HOSTILE)
        )
        one.workers["worker-c"].tell_audits(AuditNews("56" * 16, {"same": 500}, host="gpu-3"))
        with IndexClient(one.target, 60) as client:  # a tenant of bad intent
            events = one.workers["worker-a"].events
            publisher = Publisher(0, events.replace("127.0.0.1", "localhost"), "")
            client.register(
                a_worker(HOSTILE, model=HOSTILE, address="javascript:alert(2)", publishers=(publisher,))
            )
        with one.load(clients=2):
            assert eventually(lambda: data(one)["totals"]["placements"] > 20)
            # The index reads a worker's metrics once a second.
            assert eventually(lambda: data(one)["fleet"]["health"].get("asleep") == 1)
            # A request waits for those of its time that other engines have not written yet.
            assert eventually(lambda: data(one)["curve"] is not None)
            assert eventually(lambda: data(one)["audits"]["engines"] == 3)
            yield one


def data(fleet: LiveFleet) -> Any:
    """What the page is made of."""
    with urllib.request.urlopen(fleet.url + "/data", timeout=60) as reply:
        return json.loads(reply.read())


def show(page: Any, fleet: LiveFleet) -> None:
    page.goto(fleet.url)
    page.get_by_role("rowheader", name="worker-a").wait_for()


def ask(page: Any, tokens: list[int]) -> None:
    """Until somebody holds the prompt: blocks come and go with the fleet's load."""
    page.get_by_label("Model and tenant").select_option(label=f"{MODEL}, tenant default")
    page.get_by_label("Token ids, between").fill(" ".join(map(str, tokens)))
    assert eventually(lambda: is_held(page, page.get_by_role("button", name="Ask").click)), answer(page)


def is_held(page: Any, send: Callable[[], object]) -> bool:
    """Whether the page shows holders when it has been asked by ``send()``."""
    send()
    expect(page.locator("#prompt-answer")).not_to_have_text("Asking …")
    return bool(page.locator("#prompt-table tbody tr").first.is_visible())


def answer(page: Any) -> str:
    return str(page.locator("#prompt-answer").inner_text())


def is_quiet(page: Any) -> bool:
    """No refused style or script, no failed request, no exception."""
    return not [line for line in page.said if line.startswith(("error", "warning"))]


# ---- what it shows


def test_it_shows_the_fleet_as_the_index_knows_it(browser: Any, fleet: LiveFleet) -> None:
    with page_of(browser) as page:
        show(page, fleet)
        row = page.get_by_role("row", name=re.compile("worker-a"))
        expect(row.get_by_text("Healthy")).to_be_visible()
        asleep = page.get_by_role("row", name=re.compile("worker-c"))
        expect(asleep.get_by_text("Asleep", exact=True)).to_be_visible()
        expect(page.locator("#serving")).to_have_text("Serving")
        expect(page.locator("#workers-figure")).to_have_text("4")
        expect(page.locator("#pool-figure")).to_have_text(re.compile(r"^[0-9.]+ %$"))
        expect(page.locator("#pool-note")).to_contain_text("of 12.0 MiB")
        page.locator("#reuse-chart path.chosen").wait_for(state="attached")
        expect(page.locator("#reuse-text")).to_have_text(
            re.compile(r"^Last minute: of .* held [0-9.]+ %; .* found [0-9.]+ %")
        )
        expect(page.locator("#tiers tbody tr")).to_have_count(4)
        quotas = page.get_by_role("region", name="Quotas of tenants")
        expect(quotas.get_by_role("row", name=re.compile("default"))).to_have_text(
            re.compile(r"^default[0-9.]+ .?i?B of 64.0 MiB[0-9.]+ %$")
        )
        assert is_quiet(page), page.said


def test_it_shows_what_audits_found(browser: Any, fleet: LiveFleet) -> None:
    with page_of(browser) as page:
        show(page, fleet)
        card = page.get_by_role("region", name="Audited hits")
        expect(card.locator("p")).to_have_text(
            "3 engines computed 1,003 blocks of hits again, and 4 are not what they compute."
        )
        rows = card.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.nth(0)).to_have_text(
            f"34343434 on {HOSTILE}doubts itself, and goes without the pool: {HOSTILE}3"
        )
        expect(rows.nth(1)).to_have_text(
            re.compile(f"^12121212 on gpu-1the last [45] min ago, written by {BAD}1$")
        )
        assert is_quiet(page), page.said


def test_it_shows_what_a_pool_of_any_size_would_have(browser: Any, fleet: LiveFleet) -> None:
    with page_of(browser) as page:
        show(page, fleet)
        card = page.get_by_role("region", name="Hit rate by the pool's size")
        chart = card.get_by_role("img", name=re.compile("^Hit rate by the pool's size. Since 20"))
        expect(chart.locator("path.chosen")).to_have_count(1)
        expect(chart.locator("line.today")).to_have_count(1)
        expect(chart.get_by_text("today")).to_have_count(1)
        expect(page.locator("#curve-text")).to_have_text(
            re.compile(
                r"distinct ones \([0-9.]+ .iB\) has [0-9.]+ %; "
                r"one of today's size, [0-9,.K]+ blocks \([0-9.]+ MiB\), [0-9.]+ %\.$"
            )
        )
        rows = page.locator("#curve-table tbody tr")
        expect(rows).to_have_count(6)
        expect(rows.nth(2)).to_have_text(re.compile(r"^Today's size[0-9,.K]+[0-9.]+ MiB[0-9.]+ %$"))
        expect(rows.nth(5)).to_have_text(re.compile("^Every block"))
        drawn = data(fleet)["curve"]
        assert drawn["points"] == sorted(drawn["points"])
        assert card.get_by_label("Tenant").is_hidden() is False, (
            "its one tenant has a curve beside that of all"
        )
        card.get_by_label("Tenant").select_option("default")
        expect(chart).to_have_count(1)
        assert is_quiet(page), page.said


def test_it_says_who_holds_a_prompt(browser: Any, fleet: LiveFleet) -> None:
    assert eventually(lambda: fleet.workers["worker-a"].holds(fleet.prompt()))
    with page_of(browser) as page:

        def is_told() -> bool:
            show(page, fleet)
            ask(page, fleet.prompt())
            wanted = r"384 tokens: worker-\w can reuse 24 of 24 full blocks;"
            return re.match(wanted, answer(page)) is not None

        assert eventually(is_told), answer(page)
        expect(page.get_by_text("a request would go here now")).to_have_count(1)
        page.get_by_label("Token ids, between").fill("1 two 3")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#prompt-answer")).to_have_text("“two” is no token id: give whole numbers.")
        expect(page.locator("#prompt-table")).to_be_hidden()
        page.get_by_label("Text", exact=True).check()
        page.get_by_label("Text, as in").fill("the user asks the system " * 9)
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#prompt-answer")).to_contain_text("none of 3 ranks holds any")
        assert is_quiet(page), page.said


def test_a_hostile_name_is_text(browser: Any, fleet: LiveFleet) -> None:
    with page_of(browser) as page:
        alerts: list[str] = []
        page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        show(page, fleet)
        page.get_by_text(HOSTILE).first.wait_for()
        page.get_by_label("Model and tenant").select_option(label=f"{HOSTILE}, tenant default")
        ask_of_it = "1 " * 16
        page.get_by_label("Token ids, between").fill(ask_of_it)
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#prompt-answer")).to_have_text(re.compile("^16 tokens"))
        assert page.locator("main img").count() == 0
        assert page.locator("a[href^=javascript]").count() == 0
        assert not alerts
        assert all(url.startswith(fleet.url) for url in asked), asked
        # And if a line of ours made HTML of it, the page's own policy would stop it.
        stopped = page.evaluate(
            "name => { try { document.body.innerHTML = name; return 'made' } catch (error) { return error.name } }",
            HOSTILE,
        )
        assert stopped == "TypeError"
        assert not alerts


def test_workers_are_found_by_health_and_name(browser: Any, fleet: LiveFleet) -> None:
    with page_of(browser) as page:
        show(page, fleet)
        page.get_by_label("Health").select_option("Asleep")
        rows = page.locator("#workers-table tbody tr")
        expect(rows).to_have_count(1)
        expect(page.locator("#workers-count")).to_have_text("1 to 1 of 1 worker")
        page.get_by_label("Health").select_option("All")
        expect(rows).to_have_count(4)  # else the one row would be that of before
        page.get_by_label("Name contains").fill("WORKER-B")
        expect(rows).to_have_count(1)
        expect(page.get_by_role("rowheader", name="worker-b")).to_be_visible()
        page.get_by_label("Name contains").fill("nobody")
        page.get_by_text("No worker matches.").wait_for()


def test_it_goes_on_by_itself_and_says_when_the_index_is_away(browser: Any, fleet: LiveFleet) -> None:
    with page_of(browser) as page:
        show(page, fleet)
        before = page.locator("#updated").inner_text()
        expect(page.locator("#updated")).not_to_have_text(before)
        page.route("**/status/data*", lambda route: route.abort())
        page.get_by_text("The index does not answer; asking again.").wait_for()
        page.unroute("**/status/data*")
        page.locator("#notice").wait_for(state="hidden")


# ---- tokens


def test_with_tokens_it_asks_for_one_and_keeps_it_in_the_tab(browser: Any, tmp_path: Path) -> None:
    from kvpool.index.fleet.fleet import Fleet
    from kvpool.index.serve.auth import TokenAuth

    tokens = write_tokens(tmp_path / "tokens.toml", me=(["read"], ["a"]))
    guarded = Fleet()
    for tenant in ("a", "b"):
        guarded.add(a_worker(f"of-{tenant}", tenant=tenant), "flag")
    with (
        serving(guarded, auth=TokenAuth(str(tmp_path / "tokens.toml")), http=True) as served,
        page_of(browser) as page,
    ):
        page.goto(f"http://{served.http}/")
        page.get_by_role("textbox", name="Token").wait_for()
        assert "of-a" not in page.content()
        assert page.locator("#content").is_hidden()
        page.keyboard.type("wrong")  # the focus is there
        page.keyboard.press("Enter")
        page.get_by_text("this index does not know this token.").wait_for()
        page.keyboard.type(tokens["me"])
        page.keyboard.press("Enter")
        page.get_by_role("rowheader", name="of-a").wait_for()
        expect(page.locator("#pool-note")).to_have_text("For tokens of all tenants only")
        assert "of-b" not in page.content()
        assert tokens["me"] not in page.content()
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert tokens["me"] not in page.url
        page.get_by_role("button", name="Forget the token").click()
        page.get_by_role("textbox", name="Token").wait_for()
        assert page.evaluate("sessionStorage.length") == 0


# ---- for everybody


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide", "narrow"])
def test_no_violation_and_nothing_to_scroll_sideways(
    browser: Any, fleet: LiveFleet, size: tuple[int, int], scheme: str
) -> None:
    # Axe is a script of its own: the page's policy would not have it.
    with page_of(browser, size, scheme, bypass_csp=True) as page:
        show(page, fleet)
        ask(page, fleet.prompt())
        page.get_by_text("As a table").click()
        found = violations(page)
        assert [(one["impact"], one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
        widths = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] <= widths[1], widths
        over = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(one => one.getBoundingClientRect().right > innerWidth + 1"
            " && !one.closest('.scroll, .visually-hidden, thead')).map(one => one.outerHTML.slice(0, 120))"
        )
        assert over == []


def test_the_sign_in_has_no_violation(browser: Any, tmp_path: Path) -> None:
    from kvpool.index.serve.auth import TokenAuth

    write_tokens(tmp_path / "tokens.toml", me=(["read"], ["a"]))
    with serving(auth=TokenAuth(str(tmp_path / "tokens.toml")), http=True) as served:
        for scheme in ("light", "dark"):
            with page_of(browser, NARROW, scheme, bypass_csp=True) as page:
                page.goto(f"http://{served.http}/status")
                page.get_by_role("textbox", name="Token").wait_for()
                assert violations(page) == []


def test_with_the_keyboard_alone(browser: Any, fleet: LiveFleet) -> None:
    with page_of(browser) as page:
        show(page, fleet)
        reached: list[str] = []
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
            )
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none" or reached[-1] in ("", "workers"), reached
            if reached[-1] == "model":  # from the hostile one to the other
                page.keyboard.press("ArrowDown")
            if reached[-1] == "prompt":
                break
        for wanted in ("Skip to the workers", "pause", "As a table", "health", "find", "model", "prompt"):
            assert wanted in reached, reached
        page.keyboard.insert_text(" ".join(map(str, fleet.prompt())))
        page.keyboard.press("Tab")
        assert eventually(lambda: is_held(page, lambda: page.keyboard.press("Enter"))), answer(page)
        page.locator("#pause").focus()
        page.keyboard.press("Space")
        page.get_by_text("paused").wait_for()
        expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
