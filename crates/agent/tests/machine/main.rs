//! The real agent on simulated machines, with DynamoDB Local, a simulated GitHub and the runner's stand-in, which is
//! this same program.

mod bed;

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use bed::{Bed, Setup};
use jiff::{SignedDuration, Timestamp};
use libtest_mimic::{Arguments, Trial};
use nix::sys::signal::Signal as UnixSignal;
use paddock_bed_github::{Conclusion, JobRequest, Status};
use paddock_record::{KeyPair, RUNNER_ENDED, Signal, State};

const DEADLINE: Duration = Duration::from_secs(180);
const AHEAD: SignedDuration = SignedDuration::from_mins(5);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|first| first == "stand-in") {
        return paddock_bed_github::runner::main(args[1..].to_vec());
    }
    let arguments = Arguments::from_args();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime can be built");
    let bed = match arguments.list {
        true => None,
        false => Some(Arc::new(runtime.block_on(Bed::start()).expect("the bed starts"))),
    };
    macro_rules! trials {
        ($($name:ident),+ $(,)?) => {
            vec![$({
                let (bed, handle) = (bed.clone(), runtime.handle().clone());
                Trial::test(stringify!($name), move || {
                    let bed = bed.expect("started unless only listed");
                    handle.block_on($name(&bed)).map_err(|error| format!("{error:#}").into())
                })
            }),+]
        };
    }
    let trials = trials![
        a_machine_serves_one_run_after_another,
        a_proxy_is_used_but_for_its_exceptions,
        a_job_outlives_the_agent_and_the_next_agent_takes_it_over,
        a_token_sealed_to_another_key_registers_nothing,
        a_failed_script_keeps_the_instance_out,
        a_machine_without_a_library_says_what_to_install,
        a_failed_scrub_is_no_deregistration,
        another_run_takes_the_machine_over_without_a_removal_token,
        an_idle_runner_ends_with_its_agent_and_comes_back_with_the_next,
        a_runner_that_dies_is_started_again,
        a_refused_version_is_reported_and_never_counts_as_registered,
        a_refusal_of_the_newest_version_is_an_outage,
        a_runner_that_an_admin_deleted_is_reported_with_its_own_words,
        a_reclaimed_spot_instance_finishes_its_job_and_takes_no_other,
        the_runners_user_is_kept_away_from_the_metadata_service,
        a_machine_that_cannot_keep_jobs_away_says_why,
        an_expired_instance_shuts_down,
        a_terminated_instance_shuts_down,
        an_instance_without_a_record_shuts_down_in_time,
        an_agent_outlasts_the_absence_of_its_table,
    ];
    let conclusion = libtest_mimic::run(&arguments, trials);
    let violations = bed.as_ref().map_or_else(Vec::new, |bed| runtime.block_on(bed.aws.violations()));
    for violation in &violations {
        eprintln!("not as AWS has it: {violation}");
    }
    drop(bed);
    if violations.is_empty() { conclusion.exit_code() } else { ExitCode::FAILURE }
}

/// The table is behind the proxy; the metadata service and GitHub are not.
async fn a_proxy_is_used_but_for_its_exceptions(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup { proxy: true, ..Setup::default() }).await?;
    machine.record(State::Created, "", "", AHEAD).await?;
    machine.reports(Signal::ScriptOk, "").await?;
    machine.claim("9050").await?;
    machine.reports(Signal::Registered, "9050").await
}

async fn a_machine_serves_one_run_after_another(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup { script: "echo once >>prepared", ..Setup::default() }).await?;
    machine.record(State::Created, "", "", AHEAD).await?;
    machine.reports(Signal::ScriptOk, "").await?;
    ensure!(machine.file("prepared") == "once\n");
    ensure!(machine.diagnostics().contains("Load assembly"), "the runner was not warmed up");

    for run in ["9001", "9002"] {
        machine.claim(run).await?;
        machine.reports(Signal::Registered, run).await?;
        let runner = bed.github.runner(&machine.id).expect("registered under the instance's id");
        ensure!(runner.labels == [run], "{:?}", runner.labels);
        bed.github.until_online(&machine.id, true, DEADLINE).await?;

        let job = bed.github.queue_job(JobRequest {
            owner: "acme".into(),
            repo: "app".into(),
            labels: vec![run.into()],
            // I10: no environment variable of the agent reaches a job.
            // Nor does a variable of the last claim's jobs.
            script: Some(
                "touch left-behind; ! env | grep -E '^(AWS_|PADDOCK_|ACTIONS_RUNNER_INPUT_|LEFT_BEHIND)'; echo \
                 LEFT_BEHIND=1 >>../.env"
                    .into(),
            ),
            ..JobRequest::default()
        })?;
        let job = bed.github.until_job(job.id, DEADLINE, |job| job.status == Status::Completed).await?;
        ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
        ensure!(job.taken_by.is_some_and(|taker| taker.runner_name == machine.id));

        machine.release().await?;
        machine.reports(Signal::Deregistered, run).await?;
        ensure!(bed.github.runner(&machine.id).is_none());
        for name in ["_work", "_diag", ".runner", ".credentials", ".env", ".path"] {
            ensure!(!machine.path("opt/actions-runner").join(name).exists(), "{name} is left of run {run}");
        }
    }
    ensure!(!machine.contains_token(), "I10: a token is on the machine");
    Ok(())
}

/// A job that runs on this machine until the test finishes it.
async fn long_job(bed: &Bed, run: &str) -> Result<u64> {
    let request =
        JobRequest { owner: "acme".into(), repo: "app".into(), labels: vec![run.into()], ..JobRequest::default() };
    let job = bed.github.queue_job(request)?;
    bed.github.until_job(job.id, DEADLINE, |job| job.status == Status::InProgress).await?;
    Ok(job.id)
}

async fn a_job_outlives_the_agent_and_the_next_agent_takes_it_over(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup { script: "echo once >>prepared", ..Setup::default() }).await?;
    machine.record(State::Created, "", "", AHEAD).await?;
    machine.claim("9101").await?;
    machine.reports(Signal::Registered, "9101").await?;
    let (job, key) = (long_job(bed, "9101").await?, machine.public_key().await?);
    let runner = bed.github.runner(&machine.id).expect("registered").id;

    for signal in [UnixSignal::SIGKILL, UnixSignal::SIGTERM] {
        let exits = machine.file("exits").lines().count();
        machine.until_busy().await?;
        machine.kill_agent(signal).await?;
        machine.until_true("the end of the agent", || machine.file("exits").lines().count() > exits).await?;
        // A heartbeat later than this comes from the next agent.
        let ended = Timestamp::now();
        machine
            .until("a later heartbeat", async || Ok((machine.heartbeat().await?.updated_at > ended).then_some(())))
            .await?;
    }
    ensure!(machine.file("exits") == "137\n0\n", "{}", machine.file("exits"));
    ensure!(machine.public_key().await? == key, "the key changed");
    ensure!(machine.file("prepared") == "once\n", "the script ran again");
    ensure!(bed.github.job(job).is_some_and(|job| job.status == Status::InProgress));
    ensure!(bed.github.runner(&machine.id).is_some_and(|known| known.id == runner && known.job == Some(job)));

    bed.github.finish_job(job, Conclusion::Success);
    bed.github.until_job(job, DEADLINE, |job| job.status == Status::Completed).await?;
    machine.release().await?;
    machine.reports(Signal::Deregistered, "9101").await?;
    ensure!(bed.github.runner(&machine.id).is_none());
    Ok(())
}

async fn a_token_sealed_to_another_key_registers_nothing(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    let sealed = KeyPair::generate().public().seal(&bed.token("registration-token").await?);
    machine.record(State::Claimed, "9201", &sealed, AHEAD).await?;
    machine.reports(Signal::RegistrationFailed, "9201").await?;
    ensure!(bed.github.runner(&machine.id).is_none());
    ensure!(machine.log().contains("sealed to another instance's key"), "{}", machine.log());
    Ok(())
}

async fn a_failed_script_keeps_the_instance_out(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup { script: "echo no compiler; exit 3", ..Setup::default() }).await?;
    machine.record(State::Created, "9301", "", AHEAD).await?;
    let failure = machine.failure(Signal::ScriptFailed, "9301").await?;
    let detail = "the pre-runner script: ended with exit status: 3: no compiler";
    ensure!(failure.detail == detail && failure.log == "no compiler", "{failure:?}");
    machine.claim("9301").await?;
    // Heartbeats continue; a working machine would have registered by the second one.
    for _ in 0..2 {
        let beat = machine.heartbeat().await?.updated_at;
        machine
            .until("a later heartbeat", async || Ok((machine.heartbeat().await?.updated_at > beat).then_some(())))
            .await?;
    }
    ensure!(bed.github.runner(&machine.id).is_none());
    ensure!(machine.log().contains("no compiler") && machine.log().contains("exit status: 3"), "{}", machine.log());
    Ok(())
}

async fn a_machine_without_a_library_says_what_to_install(bed: &Bed) -> Result<()> {
    let missing = Some("Libicu's dependencies is missing for Dotnet Core 6.0");
    let machine = bed.boot(Setup { missing, ..Setup::default() }).await?;
    machine.record(State::Created, "", "", AHEAD).await?;
    let failure = machine.failure(Signal::ScriptFailed, "").await?;
    ensure!(failure.detail.contains("dnf install -y libicu"), "{failure:?}");
    ensure!(failure.log.contains("Libicu's dependencies is missing"), "{failure:?}");
    Ok(())
}

async fn a_failed_scrub_is_no_deregistration(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup { scrub: Some("test -e clean"), ..Setup::default() }).await?;
    machine.claim("9401").await?;
    machine.reports(Signal::Registered, "9401").await?;
    machine.release().await?;
    machine.reports(Signal::DeregistrationFailed, "9401").await?;
    ensure!(bed.github.runner(&machine.id).is_none(), "the runner itself is gone");
    std::fs::write(machine.path("clean"), "")?;
    machine.reports(Signal::Deregistered, "9401").await
}

async fn another_run_takes_the_machine_over_without_a_removal_token(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    machine.claim("9501").await?;
    machine.reports(Signal::Registered, "9501").await?;
    machine.claim("9502").await?;
    machine.reports(Signal::Registered, "9502").await?;
    let ours: Vec<_> = bed.github.runners().into_iter().filter(|runner| runner.name == machine.id).collect();
    ensure!(ours.len() == 1 && ours[0].labels == ["9502"], "{ours:?}");
    Ok(())
}

async fn an_idle_runner_ends_with_its_agent_and_comes_back_with_the_next(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    machine.claim("9601").await?;
    machine.reports(Signal::Registered, "9601").await?;
    machine.kill_agent(UnixSignal::SIGTERM).await?;
    machine.until_true("the end of the agent", || machine.file("exits") == "0\n").await?;
    ensure!(machine.log().contains("stopping the runner"), "{}", machine.log());
    machine
        .until_true("the runner's return", || machine.file("var/log/paddock-runner.log").contains("Listening for Jobs"))
        .await?;
    bed.github.until_online(&machine.id, true, DEADLINE).await
}

async fn a_runner_that_dies_is_started_again(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    machine.claim("9701").await?;
    machine.reports(Signal::Registered, "9701").await?;
    let of =
        || serde_json::from_str::<serde_json::Value>(&machine.file("var/lib/paddock/memory.json")).unwrap_or_default();
    let first = of()["runner"].clone();
    machine.kill(&std::env::current_exe()?, "run", UnixSignal::SIGKILL).await?;
    machine.until_true("another run.sh", || !of()["runner"].is_null() && of()["runner"] != first).await?;
    machine
        .until_true("it listens", || machine.file("var/log/paddock-runner.log").contains("Listening for Jobs"))
        .await?;
    bed.github.until_online(&machine.id, true, DEADLINE).await
}

async fn a_refused_version_is_reported_and_never_counts_as_registered(bed: &Bed) -> Result<()> {
    bed.github.refuse_version("2.100.0");
    let machine = bed.boot(Setup { versions: Some(("2.100.0", "2.336.0")), ..Setup::default() }).await?;
    machine.claim("9711").await?;
    let failure = machine.failure(Signal::RegistrationFailed, "9711").await?;
    ensure!(failure.reason == RUNNER_ENDED, "{failure:?}");
    ensure!(
        failure.detail.contains("GitHub refuses version 2.100.0 of the runner, the newest is 2.336.0"),
        "{failure:?}"
    );
    ensure!(failure.log.contains("is deprecated and cannot receive messages"), "{failure:?}");
    ensure!(failure.log.contains("_diag:"), "{failure:?}");
    ensure!(!machine.log().contains(Signal::Registered.as_str()), "it counted as registered");
    machine.release().await?;
    machine.reports(Signal::Deregistered, "9711").await?;
    ensure!(bed.github.runner(&machine.id).is_none());
    Ok(())
}

async fn a_refusal_of_the_newest_version_is_an_outage(bed: &Bed) -> Result<()> {
    bed.github.refuse_version("2.101.0");
    let machine = bed.boot(Setup { versions: Some(("2.101.0", "2.101.0")), ..Setup::default() }).await?;
    machine.claim("9721").await?;
    let failure = machine.failure(Signal::RegistrationFailed, "9721").await?;
    ensure!(failure.reason.is_empty() && failure.detail.contains("the runner has ended"), "{failure:?}");
    bed.github.accept_version("2.101.0");
    machine.reports(Signal::Registered, "9721").await?;
    bed.github.until_online(&machine.id, true, DEADLINE).await
}

async fn a_runner_that_an_admin_deleted_is_reported_with_its_own_words(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    machine.claim("9731").await?;
    machine.reports(Signal::Registered, "9731").await?;
    bed.github.until_online(&machine.id, true, DEADLINE).await?;
    machine.delete_runner().await?;
    let failure = machine.failure(Signal::RegistrationFailed, "9731").await?;
    ensure!(failure.reason == RUNNER_ENDED, "{failure:?}");
    ensure!(failure.detail.contains("deleted at GitHub (The runner no longer exists on the server"), "{failure:?}");
    // The next heartbeat says that there is a signal to read.
    machine
        .until("a heartbeat with the signal's time", async || {
            Ok((machine.heartbeat().await?.signalled_at == Some(failure.updated_at)).then_some(()))
        })
        .await?;
    machine.release().await?;
    machine.reports(Signal::Deregistered, "9731").await
}

async fn a_reclaimed_spot_instance_finishes_its_job_and_takes_no_other(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    machine.claim("9801").await?;
    machine.reports(Signal::Registered, "9801").await?;
    let job = long_job(bed, "9801").await?;
    machine.until_busy().await?;
    machine.interrupt_spot();
    machine.until_true("the notice", || machine.log().contains("takes this spot instance back")).await?;
    machine.until("it in the heartbeat", async || Ok(machine.heartbeat().await?.reclaimed.then_some(()))).await?;
    ensure!(bed.github.job(job).is_some_and(|job| job.status == Status::InProgress));
    bed.github.finish_job(job, Conclusion::Success);
    let job = bed.github.until_job(job, DEADLINE, |job| job.status == Status::Completed).await?;
    ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
    bed.github.until_online(&machine.id, false, DEADLINE).await
}

async fn the_runners_user_is_kept_away_from_the_metadata_service(bed: &Bed) -> Result<()> {
    let user = Setup { runner_uid: Some(4242), ..Setup::default() };
    // There is no such rule yet.
    let machine = bed.boot(Setup { firewall: "case \"$*\" in *-C*) exit 1 ;; esac", ..user }).await?;
    ensure!(machine.heartbeat().await?.warning.is_empty(), "{}", machine.log());
    let rule = |address: &str| format!("OUTPUT{address} -m owner --uid-owner 4242 -j REJECT");
    let (v4, v6) = ("-d 169.254.169.254", "-d fd00:ec2::254");
    let calls = [
        format!("iptables -w 5 -C {}", rule(&format!(" {v4}"))),
        format!("iptables -w 5 -I {}", rule(&format!(" 1 {v4}"))),
        format!("ip6tables -w 5 -C {}", rule(&format!(" {v6}"))),
        format!("ip6tables -w 5 -I {}", rule(&format!(" 1 {v6}"))),
    ];
    ensure!(machine.file("firewall").lines().eq(calls), "{}", machine.file("firewall"));

    // Where there is nft alone.
    let user = Setup { runner_uid: Some(4242), ..Setup::default() };
    let machine = bed.boot(Setup { firewall: "case $0 in */nft) ;; *) exit 1 ;; esac", ..user }).await?;
    ensure!(machine.heartbeat().await?.warning.is_empty(), "{}", machine.log());
    for address in ["ip daddr 169.254.169.254", "ip6 daddr fd00:ec2::254"] {
        let rule = format!("add rule inet paddock output meta skuid 4242 {address} reject");
        ensure!(machine.file("firewall").contains(&rule), "{}", machine.file("firewall"));
    }

    let user = Setup { runner_uid: Some(4242), ..Setup::default() };
    let machine = bed.boot(Setup { metadata_access: true, ..user }).await?;
    ensure!(machine.heartbeat().await?.warning.is_empty(), "{}", machine.log());
    ensure!(machine.file("firewall").is_empty(), "{}", machine.file("firewall"));
    Ok(())
}

async fn a_machine_that_cannot_keep_jobs_away_says_why(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    let warning = machine.heartbeat().await?.warning;
    ensure!(warning.contains("the image has no user called runner"), "{warning}");
    let user = Setup { runner_uid: Some(4242), firewall: "echo no owner match; exit 2", ..Setup::default() };
    let machine = bed.boot(user).await?;
    let warning = machine.heartbeat().await?.warning;
    ensure!(warning.contains("neither iptables nor nft could") && warning.contains("no owner match"), "{warning}");
    Ok(())
}

async fn an_expired_instance_shuts_down(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup::default()).await?;
    machine.claim("9901").await?;
    machine.reports(Signal::Registered, "9901").await?;
    // Just past, so that the minute of slack does not end before the check, even on a slow machine.
    machine.record(State::Running, "9901", "", -SignedDuration::from_secs(2)).await?;
    let beat = machine.heartbeat().await?.updated_at;
    machine
        .until("a later heartbeat", async || Ok((machine.heartbeat().await?.updated_at > beat).then_some(())))
        .await?;
    ensure!(machine.file("shutdown").is_empty(), "within the minute that is the operator's");
    machine.record(State::Running, "9901", "", -SignedDuration::from_secs(61)).await?;
    machine.until_true("shutdown", || machine.shut_down()).await
}

async fn a_terminated_instance_shuts_down(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup { script: "sleep 1000", ..Setup::default() }).await?;
    machine.record(State::Terminated, "", "", SignedDuration::ZERO).await?;
    machine.until_true("shutdown in the middle of the script", || machine.shut_down()).await
}

async fn an_instance_without_a_record_shuts_down_in_time(bed: &Bed) -> Result<()> {
    let lifetime = Duration::from_secs(600);
    let aged = |seconds| Setup { age: Some((Duration::from_secs(seconds), lifetime)), ..Setup::default() };
    // The young one first and alone: it expires after one minute.
    let young = bed.boot(aged(600)).await?;
    young.reports(Signal::ScriptOk, "").await?;
    ensure!(young.file("shutdown").is_empty());
    let old = bed.boot(aged(661)).await?;
    old.until_true("shutdown", || old.shut_down()).await
}

async fn an_agent_outlasts_the_absence_of_its_table(bed: &Bed) -> Result<()> {
    let machine = bed.boot(Setup { table: false, ..Setup::default() }).await?;
    machine.until_true("a failed heartbeat", || machine.log().contains("cannot write the heartbeat")).await?;
    machine.create_table().await?;
    machine.claim("9911").await?;
    machine.reports(Signal::Registered, "9911").await?;
    ensure!(machine.file("exits").is_empty(), "the agent ended");
    Ok(())
}
