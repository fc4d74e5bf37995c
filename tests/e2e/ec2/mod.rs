//! Claims on EC2 pools: the real user data and the real agent run on every machine.

pub mod authority;
pub mod claim;
pub mod clocks;
pub mod deletion;
pub mod drift;
pub mod expiry;
pub mod faults;
pub mod interruption;
pub mod last_words;
pub mod launch;
pub mod machine;
pub mod orders;
pub mod ownership;
pub mod refusals;
pub mod release;
pub mod scope;
pub mod selection;
pub mod waiting;
pub mod wake;
