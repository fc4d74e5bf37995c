//! The API as a real API server judges it. Nothing here needs the operator: an etcd, an API server and `kubectl` do.

mod cases;
mod files;
mod kubectl;
mod objects;
mod server;
mod sweep;

use std::{
    future::Future,
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use server::Server;
use tokio::runtime::Runtime;

/// What all tests share: one server, and the runtime that its client lives in.
struct Shared {
    runtime: Runtime,
    server: OnceLock<Server>,
}

impl Shared {
    fn server(&self) -> &Server {
        self.server.get().expect("it is started before the first test")
    }
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let shared = Arc::new(Shared { runtime: Runtime::new()?, server: OnceLock::new() });
    let mut tests = files::tests();
    tests.extend(cases::tests(&shared)?);
    tests.extend(kubectl::tests(&shared));
    tests.extend(objects::tests(&shared));
    tests.extend(sweep::tests(&shared)?);
    if !arguments.list {
        let server = shared.runtime.block_on(Server::start())?;
        shared.server.get_or_init(|| server);
    }
    Ok(libtest_mimic::run(&arguments, tests).exit_code())
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
