//! The API as a real API server judges it. Nothing here needs the operator: an etcd, an API server and `kubectl` do.

mod cases;
mod files;
mod kubectl;
mod objects;
mod server;
mod sweep;

use std::{future::Future, process::ExitCode, sync::Arc};

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use server::Server;
use tokio::runtime::Runtime;

/// What all tests share: one server, and the runtime that its client lives in.
struct Shared {
    runtime: Runtime,
    server: Server,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let runtime = Runtime::new()?;
    let mut tests = files::tests();
    if arguments.list {
        return Ok(libtest_mimic::run(&arguments, tests).exit_code());
    }
    let server = runtime.block_on(Server::start())?;
    let shared = Arc::new(Shared { runtime, server });
    tests.extend(cases::tests(&shared)?);
    tests.extend(kubectl::tests(&shared));
    tests.extend(objects::tests(&shared));
    tests.extend(sweep::tests(&shared)?);
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(shared);
    Ok(conclusion.exit_code())
}

/// A test that talks to the server.
fn test<F, R>(shared: &Arc<Shared>, name: impl Into<String>, body: F) -> Trial
where
    F: FnOnce(Arc<Shared>) -> R + Send + 'static,
    R: Future<Output = Result<()>> + Send,
{
    let shared = shared.clone();
    Trial::test(name, move || {
        let result = shared.runtime.block_on(body(shared.clone()));
        result.map_err(|error| Failed::from(format!("{error:#}")))
    })
}
