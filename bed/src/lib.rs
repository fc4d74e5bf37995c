//! The test bed: the real components around Paddock, or faithful simulations, started and stopped by one program. The
//! demo, the end-to-end tests and the benchmarks use it.

pub mod bench;
pub mod boards;
pub mod cloud;
pub mod demo;
pub mod device_plugin;
pub mod faketime;
pub mod image;
pub mod isolate;
pub mod kube;
pub mod kwok;
pub mod node;
pub mod operator;
pub mod server;
pub mod stage;
pub mod terminal;
pub mod wait;

pub use paddock_bed_aws as aws;
pub use paddock_bed_github as github;
pub use paddock_bed_process as process;
