//! `make bench`: Paddock's speed on the bed, compared with a baseline of the bed's own parts.

mod agents;
mod board_report;
mod boards;
mod claims;
mod cost;
mod ec2;
mod hand;
mod report;

use std::{collections::BTreeMap, fmt, time::Duration};

use anyhow::Result;
use clap::ValueEnum;

use crate::{
    isolate::{self, Options},
    kube::ControlPlane,
    kwok,
    stage::TOOLS,
};

/// The parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The warm pool of EC2 machines
    Ec2,
    /// Boards: from a webhook to a pod, alone and in bursts
    Boards,
    /// What a machine costs at AWS in requests a day
    Cost,
}

/// Runs the given parts, or all.
pub fn run(parts: &[Part]) -> Result<()> {
    let parts = if parts.is_empty() { Part::value_variants() } else { parts };
    let isolated = isolate::enter(Options { tools: &[TOOLS, &kwok::TOOLS].concat(), listen: 0 })?;
    tokio::runtime::Runtime::new()?.block_on(async {
        for part in parts {
            match part {
                Part::Ec2 => ec2::run(&isolated).await?,
                Part::Boards => boards::run(&isolated).await?,
                Part::Cost => cost::run(&isolated).await?,
            }
        }
        Ok(())
    })
}

/// Write counts of Paddock's kinds, pods, secrets and events since the API server started.
async fn writes(plane: &ControlPlane) -> Result<BTreeMap<String, u64>> {
    let request = axum::http::Request::get("/metrics").body(Vec::new())?;
    let text = plane.client().request_text(request).await?;
    let mut writes = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
        let label = |name: &str| {
            let (_, rest) = line.split_once(&format!("{name}=\""))?;
            rest.split_once('"').map(|(value, _)| value)
        };
        let (group, resource, verb) = (label("group"), label("resource"), label("verb"));
        let reads = ["GET", "LIST", "WATCH", "CONNECT"];
        let ours =
            group == Some("paddock.dev") || resource.is_some_and(|it| ["events", "pods", "secrets"].contains(&it));
        if ours && !verb.is_some_and(|verb| reads.contains(&verb)) {
            let count = line.rsplit(' ').next().and_then(|count| count.parse::<f64>().ok()).unwrap_or(0.0);
            *writes.entry(format!("{} {}", verb.unwrap_or("?"), resource.unwrap_or("?"))).or_default() += count as u64;
        }
    }
    Ok(writes)
}

/// The increase of the counts since `before`.
fn since(before: &BTreeMap<String, u64>, mut now: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    now.retain(|what, count| {
        *count -= before.get(what).copied().unwrap_or(0);
        *count > 0
    });
    now
}

/// Sorted figures.
#[derive(Default)]
struct Spread(Vec<f64>);

impl Spread {
    /// In milliseconds.
    fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        Self::sorted(times.into_iter().map(|time| time.as_secs_f64() * 1000.0))
    }

    fn sorted(figures: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<_> = figures.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Self(sorted)
    }

    /// The nearest-rank percentile.
    fn percentile(&self, percent: usize) -> f64 {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0.get(rank - 1).copied().unwrap_or(f64::NAN)
    }
}

/// Rows of text in aligned columns.
struct Table(Vec<Vec<String>>);

impl Table {
    fn new<const N: usize>(head: [&str; N]) -> Self {
        Self(vec![head.map(str::to_owned).to_vec()])
    }

    fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.0.push(cells.to_vec());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.0.first().map_or(0, Vec::len);
        let width = |column: usize| self.0.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..columns).map(width).collect();
        let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
        for (index, row) in self.0.iter().enumerate() {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            writeln!(f, "{}", line(cells.collect()))?;
            if index == 0 {
                writeln!(f, "{}", line(widths.iter().map(|width| "-".repeat(*width)).collect()))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let spread = Spread::of((1..=20).rev().map(Duration::from_millis));
        assert_eq!([spread.percentile(50), spread.percentile(99), spread.percentile(0)], [10.0, 20.0, 1.0]);
        assert_eq!(Spread::of([Duration::from_millis(7)]).percentile(50), 7.0);
    }

    #[test]
    fn a_table_is_markdown_that_a_person_can_read_too() {
        let mut table = Table::new(["what", "ms"]);
        table.row(["warm claim".into(), "7".into()]);
        assert_eq!(table.to_string(), "| what       | ms |\n| ---------- | -- |\n| warm claim | 7  |\n");
    }
}
