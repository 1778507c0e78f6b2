"""``kvpool quota``: say how many bytes a tenant may hold in a pool, and show what it holds."""

from __future__ import annotations

import json

from rich.text import Text

from kvpool.cli.settings import QuotaOptions
from kvpool.cli.tables import Column, add_row, console, fitted, show
from kvpool.discovery.quota import Standing, read_standings, tenants_with_quotas, write_quota
from kvpool.errors import ConfigError
from kvpool.key.key import check_tenant
from kvpool.store import StoreURL, open_for_inspection
from kvpool.text import format_size, parse_sized, redact


def run_quota(options: QuotaOptions) -> None:
    """Write or remove a quota, if asked to; then print those there are, as a table or JSON.

    Blocking, for some small calls. Errors: ``ConfigError`` for the arguments; ``StoreUnavailable``.
    """
    tenant = None if options.tenant is None else check_tenant(options.tenant)
    if options.remove and (tenant is None or options.size is not None):
        raise ConfigError("--remove takes the quota of one TENANT back, and goes without SIZE")
    with open_for_inspection(StoreURL.parse(options.pool).pools()[-1]) as store:
        if tenant is not None and options.remove:
            write_quota(store, tenant, None)
        elif tenant is not None and options.size is not None:
            write_quota(store, tenant, parse_sized(options.size))
        found = read_standings(store, tenants_with_quotas(store) if tenant is None else [tenant])
    shown = {
        name: standing
        for name, standing in found.items()
        if standing.is_unreadable or standing.quota_nbytes is not None
    }
    if options.as_json:
        tenants = [standing.as_json(name) for name, standing in shown.items()]
        print(json.dumps({"pool": redact(options.pool), "tenants": tenants}))
    else:
        _print(shown, tenant)


def said(standing: Standing) -> str:
    """Of a tenant with a quota: what it holds of it."""
    quota = format_size(standing.quota_nbytes or 0)
    if standing.held_nbytes is None:
        return f"has a quota of {quota}; what it holds is not counted yet"
    over = ": its workers store nothing new" if standing.is_over else ""
    return f"holds {format_size(standing.held_nbytes)} of a quota of {quota} ({standing.used:.0%}){over}"


def _print(shown: dict[str, Standing], tenant: str | None) -> None:
    out = console()
    if not shown:
        show(out, Text("No tenant has a quota." if tenant is None else f"Tenant {tenant} has no quota."))
        return
    columns = [Column("tenant", left=True), Column("held"), Column("quota"), Column("used")]
    for name, standing in shown.items():
        quota_nbytes, held_nbytes = standing.quota_nbytes, standing.held_nbytes
        add_row(
            columns,
            name,
            "not counted" if held_nbytes is None else format_size(held_nbytes),
            "unreadable" if quota_nbytes is None else format_size(quota_nbytes),
            "" if held_nbytes is None else f"{standing.used:.0%}",
        )
    show(out, *fitted(columns, out.width))
