//! The simulator seen from outside: over HTTP, through webhooks, and by the stand-in's programs.

mod apps;
mod bed;
mod hooks;
mod jobs;
mod limits;
mod runners;
mod stand_in;
