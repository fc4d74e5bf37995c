//! Black-box tests of the simulator: HTTP, webhooks, and the stand-in's programs.

mod apps;
mod bed;
mod hooks;
mod jobs;
mod limits;
mod runners;
mod stand_in;
