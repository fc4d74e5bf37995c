//! The lifecycle of jobs and runs: queued, assigned to a runner, completed; and timeouts.

use std::time::Duration;

use jiff::Timestamp;
use rand::Rng;
use serde_json::json;

use crate::{
    assign::{Idle, Wanted, assign},
    model::*,
    world::{Event, World},
};

/// "If the runner doesn't pick up the assigned job within 60 seconds, the job is re-queued so that a new runner can accept it"
/// (docs.github.com, "Using self-hosted runners in a workflow", "Routing precedence for self-hosted runners").
const ACCEPTANCE_TIME: Duration = Duration::from_secs(60);

impl World {
    pub fn queue_job(&mut self, request: JobRequest, now: Timestamp) -> Result<Job, String> {
        let Some(owner) = self.owner(&request.owner).cloned() else {
            return Err(format!("nobody is called '{}': create the organisation or user first", request.owner));
        };
        let repository = self.ensure_repository(&owner, &request.repo, true).id;
        let run_id = request.run_id.unwrap_or_else(|| self.id());
        let number = 1 + self.runs.values().filter(|run| run.repository == repository).count() as u64;
        let run = self.runs.entry(run_id).or_insert_with(|| Run {
            id: run_id,
            repository,
            number,
            attempt: 1,
            workflow: request.workflow.unwrap_or_else(|| "CI".into()),
            created_at: now,
            updated_at: now,
            status: Status::Queued,
            conclusion: None,
        });
        if run.repository != repository {
            return Err(format!("run {run_id} belongs to another repository than {}/{}", request.owner, request.repo));
        }
        if run.status == Status::Completed {
            (run.status, run.conclusion) = (Status::InProgress, None);
        }
        let attempt = run.attempt;
        let id = self.id();
        let status = if request.waiting { Status::Waiting } else { Status::Queued };
        let job = Job {
            id,
            run_id,
            attempt,
            superseded: false,
            name: request.name.unwrap_or_else(|| "build".into()),
            labels: request.labels,
            status,
            conclusion: None,
            taken_by: None,
            created_at: now,
            started_at: None,
            completed_at: None,
            duration: request.duration_ms.map(Duration::from_millis),
            script: request.script,
            heard: false,
            order: None,
        };
        self.jobs.insert(id, job.clone());
        self.job_event(id);
        Ok(job)
    }

    /// A job that waited for approval may now run.
    pub fn approve_job(&mut self, id: u64) {
        if let Some(job) = self.jobs.get_mut(&id).filter(|job| job.status == Status::Waiting) {
            job.status = Status::Queued;
            self.job_event(id);
        }
    }

    fn start_job(&mut self, id: u64, runner_id: u64, now: Timestamp) {
        let runner = &self.runners[&runner_id];
        let is_played = matches!(runner.session, Some(Session::Played));
        let taken_by = TakenBy {
            runner_id,
            runner_name: runner.name.clone(),
            group_id: runner.group_id,
            group_name: self.group_name(runner),
        };
        let job = self.jobs.get_mut(&id).expect("assigned from the queue");
        job.status = Status::InProgress;
        job.started_at = Some(now);
        job.taken_by = Some(taken_by);
        job.heard = is_played;
        let run_id = job.run_id;
        self.runners.get_mut(&runner_id).expect("assigned from the idle").job = Some(id);
        let run = self.runs.get_mut(&run_id).expect("a job has a run");
        (run.status, run.updated_at) = (Status::InProgress, now);
        self.job_event(id);
    }

    /// Requeues the job of a runner that disconnected before it received it.
    pub fn requeue(&mut self, id: u64) {
        if let Some(job) = self.jobs.get_mut(&id).filter(|job| job.status == Status::InProgress && !job.heard) {
            (job.status, job.taken_by, job.started_at) = (Status::Queued, None, None);
        }
    }

    /// Completes a job, frees its runner (an ephemeral one is removed), and completes the run with its last job.
    pub fn finish_job(&mut self, id: u64, conclusion: Conclusion, now: Timestamp) {
        let Some(job) = self.jobs.get_mut(&id).filter(|job| job.status != Status::Completed) else { return };
        job.status = Status::Completed;
        job.conclusion = Some(conclusion);
        job.completed_at = Some(now);
        job.started_at.get_or_insert(now);
        let run_id = job.run_id;
        if let Some(runner) = job.taken_by.as_ref().and_then(|taken| self.runners.get_mut(&taken.runner_id)) {
            runner.job = None;
            if runner.ephemeral {
                let gone = runner.id;
                self.runners.remove(&gone);
            }
        }
        self.job_event(id);
        let of_run = || self.jobs.values().filter(|job| job.run_id == run_id && !job.superseded);
        if of_run().all(|job| job.status == Status::Completed) {
            let worst = [Conclusion::Cancelled, Conclusion::Failure, Conclusion::TimedOut];
            let outcome = worst.into_iter().find(|bad| of_run().any(|job| job.conclusion == Some(*bad)));
            self.finish_run(run_id, outcome.unwrap_or(Conclusion::Success), now);
        }
    }

    pub fn finish_run(&mut self, id: u64, conclusion: Conclusion, now: Timestamp) {
        let Some(run) = self.runs.get_mut(&id).filter(|run| run.status != Status::Completed) else { return };
        run.status = Status::Completed;
        run.conclusion = Some(conclusion);
        run.updated_at = now;
        let repository = run.repository;
        let payload = self.run_payload(id);
        self.outbox.push(Event { name: "workflow_run", action: "completed".into(), repository, run: id, payload });
    }

    /// Cancels a job that has not started; otherwise notifies the runner, which then finishes the job as cancelled.
    pub fn stop_job(&mut self, id: u64, conclusion: Conclusion, now: Timestamp) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let runner = job.taken_by.as_ref().and_then(|taken| self.runners.get(&taken.runner_id));
        match (job.status, runner.and_then(|runner| runner.session.as_ref())) {
            (Status::InProgress, Some(Session::Connected { .. })) => job.order = Some(conclusion),
            _ => self.finish_job(id, conclusion, now),
        }
    }

    /// Runs these jobs of a completed run again, in its next attempt. Jobs that are not run again stay in the listing.
    pub fn rerun(&mut self, run_id: u64, jobs: &[u64], now: Timestamp) {
        let Some(run) = self.runs.get_mut(&run_id) else { return };
        run.attempt += 1;
        (run.status, run.conclusion, run.updated_at) = (Status::Queued, None, now);
        let attempt = run.attempt;
        for old in jobs {
            let id = self.id();
            let Some(old) = self.jobs.get_mut(old) else { continue };
            old.superseded = true;
            let job = Job {
                id,
                attempt,
                superseded: false,
                status: Status::Queued,
                conclusion: None,
                taken_by: None,
                created_at: now,
                started_at: None,
                completed_at: None,
                heard: false,
                order: None,
                ..old.clone()
            };
            self.jobs.insert(id, job);
            self.job_event(id);
        }
    }

    pub fn jobs_of_run(&self, run: u64) -> Vec<u64> {
        self.jobs.values().filter(|job| job.run_id == run).map(|job| job.id).collect()
    }

    fn job_event(&mut self, id: u64) {
        let job = &self.jobs[&id];
        let (run, repository) = (job.run_id, self.runs[&job.run_id].repository);
        let action = json!(job.status).as_str().expect("a status is a word").to_owned();
        let payload = self.job_payload(id, &action);
        self.outbox.push(Event { name: "workflow_job", action, repository, run, payload });
    }

    /// Applies timeouts and assigns jobs until nothing changes; returns when the next timeout is due.
    pub fn settle(&mut self, now: Timestamp) -> Option<Timestamp> {
        let mut next = None;
        let mut later = |moment: Timestamp| next = Some(next.map_or(moment, |soonest: Timestamp| soonest.min(moment)));
        let (mut done, mut unheard) = (vec![], vec![]);
        for runner in self.runners.values_mut() {
            let job = runner.job.map(|id| &self.jobs[&id]);
            match (&runner.session, job) {
                (Some(Session::Played), Some(job)) => {
                    let end = job.duration.map(|duration| job.started_at.expect("it runs") + signed(duration));
                    match end {
                        Some(end) if end <= now => done.push((job.id, Conclusion::Success)),
                        Some(end) => later(end),
                        None => {}
                    }
                }
                (Some(Session::Connected { polls: 0, last_seen }), job) => {
                    let timeout = match job {
                        None => self.timeouts.offline_after,
                        Some(job) if job.heard => self.timeouts.lost_after,
                        Some(_) => ACCEPTANCE_TIME,
                    };
                    let gone = *last_seen + signed(timeout);
                    if gone > now {
                        later(gone);
                    } else {
                        runner.session = None;
                        match job {
                            Some(job) if job.heard => done.push((job.id, job.order.unwrap_or(Conclusion::Failure))),
                            _ => unheard.extend(runner.job.take()),
                        }
                    }
                }
                _ => {}
            }
        }
        for (job, conclusion) in done {
            self.finish_job(job, conclusion, now);
        }
        for job in unheard {
            self.requeue(job);
        }
        for (job, runner) in self.assignments(now) {
            self.start_job(job, runner, now);
            if let Some(duration) = self.jobs[&job].duration {
                later(now + signed(duration));
            }
        }
        next
    }

    fn assignments(&mut self, now: Timestamp) -> Vec<(u64, u64)> {
        let queued = self.jobs.values().filter(|job| job.status == Status::Queued);
        let idle = self.runners.values().filter(|runner| {
            runner.job.is_none() && runner.session.is_some() && runner.online(now, self.timeouts.offline_after)
        });
        let random = &mut self.random.clone();
        let taken = assign(
            queued.map(|job| Wanted { job: job.id, labels: &job.labels }),
            idle.map(|runner| Idle { runner: runner.id, labels: &runner.labels }).collect(),
            |runner, job| {
                let repository = self.runs[&self.jobs[&job].run_id].repository;
                self.visible(&self.runners[&runner], self.repository_by_id(repository))
            },
            |candidates| random.random_range(0..candidates),
        );
        self.random = random.clone();
        taken
    }
}
