//! EC2 machines: claims, launches, the idle queue, and a machine's lifecycle.

pub mod capacity_memory;
pub mod claim;
mod claim_order;
#[cfg(test)]
mod claim_scenario;
pub mod claim_status;
pub mod drift;
pub mod failed_boots;
pub mod idle_queue;
pub mod launch;
pub mod launch_error;
pub mod machine;
pub mod matching;
pub mod network;
pub mod pool_status;
pub mod requirements;
pub mod rerun;
pub mod reuse_scope;
pub mod runner_release;
pub mod upkeep;
pub mod user_data;
pub mod waiting_line;
pub mod warm;
pub mod worker_status;
pub mod workflow_run;
pub mod zones;
