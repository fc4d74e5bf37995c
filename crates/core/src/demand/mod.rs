//! Who gets capacity: jobs, their owners, and the runners that serve them.

pub mod job;
pub mod job_facts;
pub mod pool_selection;
pub mod quota;
pub mod refusals;
pub mod schedule;
pub mod supply;
