//! RISC-V boards: slots, pods, and a worker's lifecycle.

pub mod claim_status;
pub mod health;
pub mod pod;
pub mod pool_status;
pub mod removal;
pub mod slots;
pub mod worker;
pub mod worker_status;
