//! RISC-V boards: slots, pods, and the life of a worker.

pub mod claim_status;
pub mod health;
pub mod pod;
pub mod slots;
pub mod worker;
