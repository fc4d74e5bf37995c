//! Results of the boards benchmark, next to the targets and the figures of the reference scheduler.

use std::{collections::BTreeMap, fmt, time::Duration};

use super::{Spread, Table};

#[derive(Default)]
pub struct Report {
    pub delayed: Vec<Delayed>,
    pub calls_a_minute: BTreeMap<String, u64>,
    pub writes_a_minute: BTreeMap<String, u64>,
    /// In KiB: all, and without the mapped program file.
    pub memory_300: (u64, u64),
    pub memory_10_000: (u64, u64),
    /// Per second: jobs that become claims, known jobs, and jobs that no pool serves.
    pub webhooks: [f64; 3],
    /// The operator's own time for each job that becomes a claim.
    pub cpu_per_job: Duration,
    pub rest: BTreeMap<String, u64>,
    /// The API server's maximum rate without other clients.
    pub writes_a_second: f64,
}

/// With a GitHub that answers after `delay` milliseconds.
#[derive(Default)]
pub struct Delayed {
    pub delay: u64,
    pub single: Spread,
    pub single_among_100: Spread,
    pub burst_100: Duration,
    pub burst_300: Duration,
    /// For 300 jobs at once, until all have ended.
    pub calls: BTreeMap<String, u64>,
    pub writes: BTreeMap<String, u64>,
}

impl Delayed {
    fn calls_per_job(&self) -> f64 {
        self.calls.values().sum::<u64>() as f64 / 300.0
    }
}

fn at_most(found: f64, limit: f64) -> String {
    format!("≤ {limit}: {}", if found <= limit { "yes" } else { "NO" })
}

fn at_least(found: f64, limit: f64) -> String {
    format!("≥ {limit}: {}", if found >= limit { "yes" } else { "NO" })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut times = Table::new(["webhook to pod", "GitHub ms", "p50 ms", "p99 ms", "seed ms", "target ms"]);
        for found in &self.delayed {
            let slow = found.delay > 0;
            let pick = |quick: &'static str, late: &'static str| (if slow { late } else { quick }).to_owned();
            let mut row = |what: &str, spread: Option<&Spread>, all: f64, seed: String, target: f64| {
                let (p50, p99) = spread.map_or((all, all), |spread| (spread.percentile(50), spread.percentile(99)));
                let p99 = spread.map_or(String::new(), |_| format!("{p99:.0}"));
                times.row([
                    what.to_owned(),
                    found.delay.to_string(),
                    format!("{p50:.0}"),
                    p99,
                    seed,
                    at_most(p50.round(), target),
                ]);
            };
            let single = if slow { 150.0 } else { 30.0 };
            row("one job, nothing else", Some(&found.single), 0.0, pick("270", "850"), single);
            row("one job, 100 others run", Some(&found.single_among_100), 0.0, pick("500", "13300"), single);
            let ms = |time: Duration| time.as_secs_f64() * 1000.0;
            let (hundred, all) = if slow { (3000.0, 8000.0) } else { (1500.0, 4000.0) };
            row("100 at once, last pod", None, ms(found.burst_100), pick("22000", "53000"), hundred);
            row("300 at once, last pod", None, ms(found.burst_300), pick("80000", "205000"), all);
        }
        writeln!(f, "{times}")?;

        let mut other = Table::new(["what", "found", "seed", "target"]);
        for found in &self.delayed {
            other.row([
                format!("GitHub calls per job, 300 at once, GitHub {} ms", found.delay),
                format!("{:.2}", found.calls_per_job()),
                "4".into(),
                at_most(found.calls_per_job(), 1.2),
            ]);
        }
        let calls = self.calls_a_minute.values().sum::<u64>() as f64;
        other.row([
            "GitHub calls a minute, 100 healthy jobs".into(),
            format!("{calls}"),
            "480".into(),
            at_most(calls, 20.0),
        ]);
        let [made, known, foreign] = self.webhooks;
        other.row([
            "webhooks a second, new jobs".into(),
            format!("{made:.0}"),
            "575".into(),
            at_least(made.round(), 2000.0),
        ]);
        other.row([
            "webhooks a second, jobs that are known".into(),
            format!("{known:.0}"),
            String::new(),
            String::new(),
        ]);
        other.row(["webhooks a second, jobs of others".into(), format!("{foreign:.0}"), String::new(), String::new()]);
        let mib = |kib: u64| kib as f64 / 1024.0;
        for (what, (all, own), seed, limit) in [
            ("300 jobs", self.memory_300, "175 MB", 60.0),
            ("10,000 claims and workers", self.memory_10_000, "", 100.0),
        ] {
            other.row([
                format!("memory, {what}: resident MiB (without the program file)"),
                format!("{:.0} ({:.0})", mib(all), mib(own)),
                seed.into(),
                at_most(mib(all).round(), limit),
            ]);
        }
        writeln!(f, "{other}")?;
        writeln!(f, "- writes in a minute of 100 healthy jobs: {:?}", self.writes_a_minute)?;
        writeln!(f, "- the API server's writes a second, alone: {:.0}", self.writes_a_second)?;
        let cpu = self.cpu_per_job.as_secs_f64();
        writeln!(
            f,
            "- the operator's own CPU for each new job, of which 300 get a pod: {:.2} ms, so {:.0} a second for a core",
            1000.0 * cpu,
            1.0 / cpu
        )?;
        writeln!(f, "- writes at rest, in 30 s: {:?} (target: none)", self.rest)?;
        writeln!(f, "- GitHub calls in that minute: {:?}", self.calls_a_minute)?;
        for found in &self.delayed {
            writeln!(f, "- GitHub calls of 300 at once, GitHub {} ms: {:?}", found.delay, found.calls)?;
            writeln!(f, "- writes of 300 at once, to their end, the bed's own among them: {:?}", found.writes)?;
        }
        Ok(())
    }
}
