//! The dashboards as HTML pages, without scripts or external files.

use maud::{DOCTYPE, Markup, html};

use super::rows::{ClaimRow, Usage, WorkerRow};

const STYLE: &str = "
  :root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent) }
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
  nav a { margin-right: 1.2rem } h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
  table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .35rem .8rem .35rem 0; vertical-align: top }
  tr { border-bottom: 1px solid var(--line) } th { font-weight: 600 } code { font-size: .92em }
  .ok { color: #1a7f37 } .bad { color: #c93c37 } .quiet { opacity: .65 } pre { white-space: pre-wrap; margin: .3rem 0 }
";

fn page(title: &str, body: Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="refresh" content="5";
                title { "Paddock: " (title) }
                style { (maud::PreEscaped(STYLE)) }
            }
            body {
                nav { a href="/usage" { "Usage" } a href="/history" { "History" } a href="/workers" { "Workers" } }
                h1 { (title) }
                (body)
            }
        }
    }
}

pub fn usage(usage: &Usage) -> Markup {
    let counts = |counts: &std::collections::BTreeMap<&str, u32>| {
        let texts: Vec<_> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
        if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
    };
    page(
        "Usage",
        html! {
            h2 { "Pools" }
            @if usage.pools.is_empty() { p.quiet { "No RunnerPool yet: apply one, such as examples/ec2-pool.yaml." } }
            @else {
                table {
                    tr { th { "Pool" } th { "Idle" } th { "Claimed" } th { "Running" } th { "Slots free" } th { "State" } }
                    @for pool in &usage.pools {
                        tr {
                            td { (pool.namespace) "/" (pool.name) }
                            td { (pool.workers.idle) } td { (pool.workers.claimed) } td { (pool.workers.running) }
                            td { (pool.slots.as_deref().unwrap_or("")) }
                            td class=(if pool.ready { "ok" } else { "bad" }) { (pool.message) }
                        }
                    }
                }
            }
            h2 { "Claims and workers" }
            @if usage.groups.is_empty() { p.quiet { "Nothing waits and nothing runs." } }
            @else {
                table {
                    tr { th { "For" } th { "Labels" } th { "Claims" } th { "Workers" } }
                    @for group in &usage.groups {
                        tr {
                            td { (group.entity) } td { code { (group.labels.join(", ")) } }
                            td { (counts(&group.claims)) } td { (counts(&group.workers)) }
                        }
                    }
                }
            }
        },
    )
}

pub fn history(rows: &[ClaimRow]) -> Markup {
    page(
        "History",
        html! {
            @if rows.is_empty() { p.quiet { "No claims." } }
            @else {
                table {
                    tr { th { "Claim" } th { "Pool" } th { "Phase" } th { "Ready" } th { "Run" } th { "Created" } th { "Why" } }
                    @for row in rows {
                        tr {
                            td { (row.namespace) "/" (row.name) } td { (row.pool) } td { (row.phase.as_str()) }
                            td { (row.progress) } td { code { (row.run_id) } }
                            td { (time(row.created)) } td { (row.message.as_deref().unwrap_or("")) }
                        }
                    }
                }
            }
        },
    )
}

pub fn workers(rows: &[WorkerRow]) -> Markup {
    page(
        "Workers",
        html! {
            @if rows.is_empty() { p.quiet { "No workers." } }
            @else {
                table {
                    tr { th { "Worker" } th { "Pool" } th { "State" } th { "Claim" } th { "Where" } th { "Created" } th { "Failure" } }
                    @for row in rows {
                        tr {
                            td { code { (row.name) } } td { (row.pool) } td { (row.state.unwrap_or("")) }
                            td { (row.claim.as_deref().unwrap_or("")) } td { (row.location.as_deref().unwrap_or("")) }
                            td { (time(row.created)) }
                            td {
                                @if let Some(failure) = &row.failure {
                                    span.bad { (failure.reason.as_str()) } " " (failure.message)
                                    @if let Some(log) = &failure.log_tail { details { summary { "Log" } pre { (log) } } }
                                }
                            }
                        }
                    }
                }
            }
        },
    )
}

fn time(time: Option<jiff::Timestamp>) -> String {
    time.map(|time| time.strftime("%Y-%m-%d %H:%M:%SZ").to_string()).unwrap_or_default()
}
