use paddock_bed_process::write_program;

use super::*;

/// An installation whose `config.sh` and `run.sh` are the given script.
fn installation(script: &str) -> (tempfile::TempDir, Installation) {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.sh", "run.sh"] {
        write_program(&dir.path().join(name), format!("#!/bin/bash\n{script}\n")).unwrap();
    }
    let (log, environment) = (dir.path().join("log"), dir.path().join("image.env"));
    let installation = Installation { dir: dir.path().into(), log, environment, user: User::Own };
    (dir, installation)
}

#[tokio::test]
async fn i10_the_token_is_in_the_environment_of_config_sh_and_nowhere_else() {
    let (dir, runner) =
        installation("printf '%s ' \"$@\" >args; env >env; echo \"bad token $ACTIONS_RUNNER_INPUT_TOKEN\"; exit 1");
    let token = Token("s3cr3t".into());
    let error = runner.configure("https://github.com/acme", "", &token, "i-1", "77").await.unwrap_err();
    assert_eq!(format!("{error:#}"), "config.sh: ./config.sh ended with exit status: 1: bad token ***");
    let read = |name| fs::read_to_string(dir.path().join(name)).unwrap();
    assert_eq!(
        read("args"),
        "--unattended --url https://github.com/acme --name i-1 --labels 77 --no-default-labels --replace \
         --disableupdate "
    );
    assert!(read("env").contains("ACTIONS_RUNNER_INPUT_TOKEN=s3cr3t"));
    runner.start().unwrap().wait().await.unwrap();
    assert!(!read("env").contains("s3cr3t"));
}

#[tokio::test]
async fn a_registration_starts_from_nothing_even_where_the_last_was_cut_off() {
    let (dir, runner) =
        installation(&format!("for file in {}; do test ! -e $file || exit 1; done", REGISTRATION.join(" ")));
    for name in REGISTRATION {
        fs::write(dir.path().join(name), "").unwrap();
    }
    assert!(runner.is_configured());
    runner.configure("https://github.com/acme", "", &Token("t".into()), "i-1", "77").await.unwrap();
    assert!(!runner.is_configured());
}

#[tokio::test]
async fn the_variables_of_one_claim_are_not_there_for_the_next_but_those_of_the_image() {
    let (dir, runner) = installation("echo LANG=C >>.env; echo /bin >.path");
    let read = |name| fs::read_to_string(dir.path().join(name)).unwrap_or_default();
    runner.check().await.unwrap();
    fs::write(dir.path().join(".env"), "LD_PRELOAD=evil.so\n").unwrap();
    runner.forget().unwrap();
    assert_eq!((read(".env"), read(".path")), (String::new(), String::new()));

    fs::write(dir.path().join(".env"), "http_proxy=http://proxy\n").unwrap();
    runner.check().await.unwrap();
    fs::remove_file(dir.path().join(".env")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("victim"), dir.path().join(".env")).unwrap();
    runner.forget().unwrap();
    assert_eq!(read(".env"), "http_proxy=http://proxy\n");
    assert!(!dir.path().join("victim").exists(), "a link that a job has left was followed");
}

#[tokio::test]
async fn a_missing_library_is_named_with_what_to_install() {
    let (_dir, runner) = installation(
        "echo \"Libicu's dependencies is missing for Dotnet Core 6.0\"; echo Execute installdependencies.sh; exit 1",
    );
    let error = format!("{:#}", runner.check().await.unwrap_err());
    assert!(error.contains("dnf install -y libicu") && error.contains("Libicu's dependencies is missing"), "{error}");
    let (_dir, runner) = installation("echo Must not run with sudo; exit 1");
    let error = format!("{:#}", runner.check().await.unwrap_err());
    assert!(error.contains("does not start on this machine") && error.contains("Must not run with sudo"), "{error}");
}

#[tokio::test]
async fn a_runner_that_is_gone_counts_as_removed_and_a_refusal_does_not() {
    let answer = |code: &str, verb: &str| {
        format!(
            "echo \"Http response code: {code} from '{verb} https://api.github.com/orgs/acme/actions/runners/1' (Request \
             Id: 1)\" >&2; echo Failed: Removing runner from the server; exit 1"
        )
    };
    let remove = async |script: &str| {
        let (_dir, runner) = installation(script);
        runner.remove(&Token("AREMOVAL".into())).await
    };
    remove(&answer("NotFound", "Delete")).await.unwrap();
    assert!(remove(&answer("Forbidden", "Delete")).await.is_err());
    let refused = remove(&answer("NotFound", "Post")).await.unwrap_err();
    assert!(format!("{refused:#}").contains("Http response code: NotFound"), "the line before the last: {refused:#}");
}

#[tokio::test]
async fn the_runners_newest_log_about_itself_is_read_and_goes_with_the_work() {
    let (dir, runner) = installation("");
    assert_eq!(runner.diagnostics().await, "");
    fs::create_dir_all(dir.path().join("_diag")).unwrap();
    fs::write(dir.path().join("_diag/Runner_1.log"), "the cause\n").unwrap();
    fs::write(dir.path().join("_diag/Worker_2.log"), "of a job\n").unwrap();
    assert_eq!(runner.diagnostics().await, "the cause\n");
    runner.scrub().await.unwrap();
    assert!(!dir.path().join("_diag").exists());
}

#[tokio::test]
async fn what_is_no_single_label_is_never_registered() {
    let (dir, runner) = installation("touch called");
    for run_id in ["", "1,2", "--ephemeral", "-1", "1 2", "1\n", "$(id)", "ü"] {
        let error =
            runner.configure("https://github.com/acme", "", &Token("t".into()), "i-1", run_id).await.unwrap_err();
        assert!(error.to_string().ends_with("cannot be a runner's label"), "{error}");
    }
    assert!(!dir.path().join("called").exists());
}

#[tokio::test]
async fn scrubbing_leaves_nothing_of_the_jobs() {
    let (dir, runner) = installation("");
    runner.scrub().await.unwrap();
    fs::create_dir_all(dir.path().join("_work/repo/.git")).unwrap();
    runner.scrub().await.unwrap();
    assert!(!dir.path().join("_work").exists() && dir.path().join("config.sh").exists());
}

#[tokio::test]
async fn the_runner_joins_the_group_of_its_record() {
    let (dir, runner) = installation("printf '%s\\n' \"$@\" >args");
    runner.configure("https://github.com/acme", "R&D boards", &Token("t".into()), "i-1", "77").await.unwrap();
    assert!(fs::read_to_string(dir.path().join("args")).unwrap().ends_with("--runnergroup\nR&D boards\n"));
}

/// Serves `body` to each request, and returns the address.
async fn serve(body: Vec<u8>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/runner.tar.gz", listener.local_addr().unwrap());
    let app = axum::Router::new().fallback(async move || body);
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

#[tokio::test]
async fn a_runner_is_installed_only_if_its_checksum_is_known_and_right() {
    let (source, _) = installation("");
    let archive = source.path().join("archive");
    let mut tar = Command::new("tar");
    assert!(
        tar.arg("-czf")
            .arg(&archive)
            .args(["config.sh", "run.sh"])
            .current_dir(&source)
            .status()
            .await
            .unwrap()
            .success()
    );
    let sum = Command::new("sha256sum").arg(&archive).output().await.unwrap().stdout;
    let sum = String::from_utf8(sum).unwrap()[..64].to_owned();
    let url = serve(fs::read(&archive).unwrap()).await;
    let dir = tempfile::tempdir().unwrap();
    let install = async |name: &str, architecture: &str, sha256: Option<&str>| {
        let dir = dir.path().join(name);
        let runner =
            Installation { dir: dir.clone(), log: dir.join("log"), environment: dir.join("env"), user: User::Own };
        let archive = RunnerArchive { url: url.clone(), sha256: sha256.map(str::to_owned) };
        let installed = runner.install(&BTreeMap::from([(architecture.to_owned(), archive)])).await;
        (dir.join("config.sh").exists(), installed.map_err(|error| format!("{error:#}")).err().unwrap_or_default())
    };
    let here = architecture(std::env::consts::ARCH);
    assert_eq!(install("right", here, Some(&sum)).await, (true, String::new()));
    let (there, error) = install("wrong", here, Some(&"0".repeat(64))).await;
    assert!(!there && error.starts_with(&format!("what {url} serves does not have the checksum 000")), "{error}");
    let (there, error) = install("unknown", here, None).await;
    assert!(!there && error.ends_with("set runnerSha256 in the pool, or put a runner into the image"), "{error}");
    let (there, error) = install("other", "riscv64", Some(&sum)).await;
    assert!(!there && error.ends_with("put one into the image"), "{error}");
}

#[test]
fn the_runner_runs_as_the_user_that_the_image_made_for_it() {
    let passwd = "root:x:0:0:root:/root:/bin/bash\nrunner:x:1001:1002:,,,:/home/runner:/bin/bash\n";
    let runner = User::Runner { uid: 1001, group: "1002".into(), home: "/home/runner".into() };
    assert_eq!(User::of(0, passwd), runner);
    assert_eq!(User::of(0, "root:x:0:0:root:/root:/bin/bash"), User::Root);
    assert_eq!(User::of(0, "runner:x:0:0::/root:/bin/bash"), User::Root);
    assert_eq!(User::of(1001, passwd), User::Own);
}
