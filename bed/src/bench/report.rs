//! Results of the EC2 benchmark, next to the targets and the figures of the reference system.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    time::Duration,
};

use super::{
    Spread, Table,
    ec2::{IDLE_PERIOD, Release, Round},
};
use crate::aws::Calls;

#[derive(Default)]
pub struct Report {
    pub creations: Vec<(Round, Release)>,
    /// One claim at a time, by size.
    pub warm: Vec<(usize, Vec<(Round, Release)>)>,
    /// Several claims at once.
    pub races: Vec<(&'static str, Round, Option<Release>)>,
    pub rest: Rest,
    /// The baseline's median in milliseconds, by size.
    pub hand: HashMap<usize, f64>,
}

/// An idle system.
#[derive(Default)]
pub struct Rest {
    /// How long the Workers took to catch up with the machines.
    pub settled: Duration,
    pub writes: BTreeMap<String, u64>,
    pub calls: Calls,
}

/// The targets, in milliseconds or calls.
fn verdict(found: f64, limit: f64) -> String {
    format!("≤ {limit}: {}", if found <= limit { "yes" } else { "NO" })
}

fn total(calls: &Calls) -> u64 {
    calls.values().flat_map(BTreeMap::values).sum()
}

/// The reference figure and target of each row.
fn known(row: &str) -> (&'static str, Option<f64>) {
    match row {
        "warm claim of 1" => ("690", Some(100.0)),
        "warm claim of 10" => ("790", None),
        "warm claim of 100" => ("1180", Some(400.0)),
        "10 claims of 10 race for 100" => ("2600", None),
        "100 claims of 10 from 1,000" => ("", Some(6000.0)),
        _ => ("", None),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}\n{}\n{}", self.claims(), self.overheads(), self.calls(), self.rest)
    }
}

impl Report {
    fn claims(&self) -> Table {
        let mut table = Table::new([
            "claims",
            "p50 ms",
            "p99 ms",
            "all ms",
            "runners/s",
            "by hand ms",
            "ratio",
            "waits for agents",
            "calls/runner",
            "writes/runner",
            "created",
            "twice",
            "seeds ms",
            "target ms",
        ]);
        let mut row = |name: &str, runners: usize, rounds: &[&Round]| {
            let times = Spread::of(rounds.iter().flat_map(|round| round.served.iter().map(|(time, _)| *time)));
            let whole = Spread::of(rounds.iter().map(|round| round.whole)).percentile(50);
            let share = Spread::sorted(rounds.iter().flat_map(|round| round.waited.iter().copied())).percentile(50);
            let calls: u64 = rounds.iter().map(|round| total(&round.calls)).sum();
            let writes: u64 = rounds.iter().map(|round| round.writes).sum();
            let per_runner = |count: u64| format!("{:.1}", count as f64 / (runners * rounds.len()) as f64);
            let hand = self.hand.get(&runners).copied().unwrap_or(f64::NAN);
            let (seeds, target) = known(name);
            table.row([
                name.to_owned(),
                format!("{:.0}", times.percentile(50)),
                format!("{:.0}", times.percentile(99)),
                format!("{whole:.0}"),
                format!("{:.0}", runners as f64 / whole * 1000.0),
                format!("{hand:.0}"),
                format!("{:.2}", whole / hand),
                format!("{:.0} %", share * 100.0),
                per_runner(calls),
                per_runner(writes),
                rounds.iter().map(|round| round.created).sum::<usize>().to_string(),
                rounds.iter().map(|round| round.twice).sum::<usize>().to_string(),
                seeds.to_owned(),
                target.map(|limit| verdict(whole, limit)).unwrap_or_default(),
            ]);
        };
        for (size, rounds) in &self.warm {
            row(&format!("warm claim of {size}"), *size, &rounds.iter().map(|(round, _)| round).collect::<Vec<_>>());
        }
        for (name, round, _) in &self.races {
            row(name, round.served.iter().map(|(_, ids)| ids.len()).sum(), &[round]);
        }
        table
    }

    fn overheads(&self) -> Table {
        let mut table =
            Table::new(["after the last agent's signal", "median ms", "most ms", "whole ms", "seeds ms", "target ms"]);
        let mut row = |name: String, after: Vec<Duration>, whole: Vec<Duration>, seeds: &str| {
            let (after, whole) = (Spread::of(after), Spread::of(whole));
            table.row([
                name,
                format!("{:.0}", after.percentile(50)),
                format!("{:.0}", after.percentile(100)),
                format!("{:.0}", whole.percentile(50)),
                seeds.to_owned(),
                verdict(after.percentile(50), 300.0),
            ]);
        };
        let after = |rounds: &[&Round]| rounds.iter().flat_map(|round| round.after_signal.clone()).collect();
        let created: Vec<_> = self.creations.iter().map(|(round, _)| round).collect();
        row("50 created, to Ready".into(), after(&created), created.iter().map(|r| r.whole).collect(), "10200");
        for (size, rounds) in &self.warm {
            let claims: Vec<_> = rounds.iter().map(|(round, _)| round).collect();
            row(
                format!("{size} from the pool, to Ready"),
                after(&claims),
                claims.iter().map(|r| r.whole).collect(),
                "",
            );
        }
        for (size, rounds) in &self.warm {
            let releases = rounds.iter().map(|(_, release)| release);
            let (after, whole) = releases.map(|release| (release.after_signal, release.whole)).unzip();
            row(format!("{size} released, to claimable"), after, whole, "10200");
        }
        table
    }

    fn calls(&self) -> Table {
        let mut table = Table::new(["AWS calls per runner", "in all", "by API"]);
        let mut row = |name: String, runners: usize, calls: Vec<&Calls>| {
            let mut by_api: BTreeMap<&str, u64> = BTreeMap::new();
            for (action, count) in calls.iter().flat_map(|calls| calls.values().flatten()) {
                *by_api.entry(action).or_default() += count;
            }
            let each = |count: u64| format!("{:.2}", count as f64 / runners as f64);
            let all = by_api.values().sum();
            let by_api = by_api.iter().map(|(action, count)| format!("{action} {}", each(*count)));
            table.row([name, each(all), by_api.collect::<Vec<_>>().join(", ")]);
        };
        for (size, rounds) in &self.warm {
            let runners = size * rounds.len();
            row(format!("warm claim of {size}"), runners, rounds.iter().map(|(round, _)| &round.calls).collect());
            row("its release".to_owned(), runners, rounds.iter().map(|(_, release)| &release.calls).collect());
        }
        for (name, round, release) in &self.races {
            let runners = round.served.iter().map(|(_, ids)| ids.len()).sum();
            row((*name).to_owned(), runners, vec![&round.calls]);
            if let Some(release) = release {
                row("their release".to_owned(), runners, vec![&release.calls]);
            }
        }
        table
    }
}

impl fmt::Display for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = total(&self.calls) as f64 / IDLE_PERIOD.as_secs_f64();
        writeln!(
            f,
            "At rest, watched for {} s, after the Workers had settled within {:.0} s:",
            IDLE_PERIOD.as_secs(),
            self.settled.as_secs_f64()
        )?;
        writeln!(f, "- writes to the API server, beside the lease: {:?} (target: none)", self.writes)?;
        writeln!(f, "- AWS calls: {rate:.2} a second ({}): {:?}", verdict(rate, 1.0), self.calls)
    }
}
