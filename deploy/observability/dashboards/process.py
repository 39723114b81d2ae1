"""The row that every role's dashboard ends with: the processes themselves."""

from __future__ import annotations

from deploy.observability.model import DASHBOARD, Panel, Query, Row


def process_row(role: str) -> Row:
    """CPU, memory, event loop, RPCs and certificates of the processes of a role."""
    lag = DASHBOARD.quantile(0.99, "kvbraid_process_loop_lag_seconds", ("instance",), role)
    slow = DASHBOARD.quantile(0.95, "kvbraid_rpc_duration_seconds", ("method",), role)
    expiry = DASHBOARD.series("kvbraid_tls_certificate_expiry_timestamp_seconds", role)
    return Row(
        "Processes",
        (
            Panel("Event-loop lag", "Is a process too busy to answer in time?", "s",
                  (Query(lag, "{{instance}} p99"),)),
            Panel("CPU", "How many cores does each process use?", "short",
                  (Query(DASHBOARD.rate("process_cpu_seconds_total", role), "{{instance}}"),)),
            Panel("Memory", "Does a process grow?", "bytes",
                  (Query(DASHBOARD.series("process_resident_memory_bytes", role),
                         "{{instance}}"),)),
            Panel("RPCs", "Which calls are served, and how do they end?", "reqps",
                  (Query("sum by (method, code) ("
                         + DASHBOARD.rate("kvbraid_rpc_requests_total", role) + ")",
                         "{{method}} {{code}}"),)),
            Panel("RPC time", "Which call is slow?", "s", (Query(slow, "{{method}} p95"),)),
            Panel("Start", "When did each process start? A jump is a restart.", "dtdurations",
                  (Query("time() - " + DASHBOARD.series("process_start_time_seconds", role),
                         "{{instance}}"),)),
            Panel("Certificates", "How long until a certificate expires? At 0 it has.",
                  "dtdurations",
                  (Query(f"clamp_min({expiry} - time(), 0)", "{{instance}} {{setting}}"),),
                  needs="tls"),
        ),
    )  # fmt: skip
