//! Which idle runner takes which queued job.

/// A job in the queue, oldest first.
pub struct Wanted<'a> {
    pub job: u64,
    pub labels: &'a [String],
}

/// An idle, online runner.
pub struct Idle<'a> {
    pub runner: u64,
    pub labels: &'a [String],
}

/// A runner matches a job if it has all the job's labels, compared without case.
pub fn serves(runner: &[String], job: &[String]) -> bool {
    job.iter().all(|wanted| runner.iter().any(|label| crate::model::same(label, wanted)))
}

/// Assigns each job, in order, to a runner that matches it and may access its repository. GitHub guarantees no order
/// among the candidates: `pick` gets their number and returns an index.
pub fn assign<'a>(
    jobs: impl IntoIterator<Item = Wanted<'a>>,
    mut idle: Vec<Idle<'a>>,
    visible: impl Fn(u64, u64) -> bool,
    mut pick: impl FnMut(usize) -> usize,
) -> Vec<(u64, u64)> {
    let mut taken = Vec::new();
    for job in jobs {
        let candidates: Vec<usize> = (0..idle.len())
            .filter(|&at| serves(idle[at].labels, job.labels) && visible(idle[at].runner, job.job))
            .collect();
        if !candidates.is_empty() {
            let chosen = idle.remove(candidates[pick(candidates.len())]);
            taken.push((job.job, chosen.runner));
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_runner_needs_every_label_of_the_job_and_may_have_more() {
        assert!(serves(&labels("self-hosted linux Big"), &labels("BIG self-hosted")));
        assert!(!serves(&labels("self-hosted linux"), &labels("linux gpu")));
    }

    #[test]
    fn the_oldest_job_goes_first_and_no_runner_takes_two() {
        let (both, gpu) = (labels("linux gpu"), labels("gpu"));
        let jobs = || [Wanted { job: 1, labels: &gpu }, Wanted { job: 2, labels: &gpu }];
        let idle = vec![Idle { runner: 7, labels: &both }];
        assert_eq!(assign(jobs(), idle, |_, _| true, |_| 0), [(1, 7)]);
    }

    #[test]
    fn any_candidate_may_be_picked_but_only_one_that_sees_the_job() {
        let gpu = labels("gpu");
        let idle = || [7, 8, 9].map(|runner| Idle { runner, labels: &gpu }).into();
        let job = || [Wanted { job: 1, labels: &gpu }];
        assert_eq!(assign(job(), idle(), |_, _| true, |of| of - 1), [(1, 9)]);
        assert_eq!(assign(job(), idle(), |runner, _| runner == 8, |of| of - 1), [(1, 8)]);
    }
}
