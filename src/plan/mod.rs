//! Decisions. Plain functions over values: no I/O, no clock, time is passed in.

pub mod board_claim;
pub mod board_worker;
pub mod capacity;
pub mod claim;
pub mod deliveries;
pub mod demand;
pub mod entity;
pub mod fleet;
pub mod health;
pub mod heard;
pub mod instance;
pub mod jobs;
pub mod labels;
pub mod names;
pub mod pickup;
pub mod pod;
pub mod registration;
pub mod retention;
pub mod run;
#[cfg(test)]
pub(crate) mod sample_ec2;
#[cfg(test)]
pub(crate) mod samples;
pub mod shortage;
pub mod signature;
pub mod supply;
pub mod user_data;
pub mod webhook;
