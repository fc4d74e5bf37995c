//! The defects that each must break a property.

/// A deliberate defect of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    None,
    /// A message is deleted when it is received, and no message is restored.
    DeletesFirst,
    NeverRestores,
    /// idle → claimed without a condition.
    ClaimsBlindly,
    /// idle → claimed even if `leaving` is set.
    IgnoresLeaving,
    /// Each `CreateFleet` has a new client token.
    NewTokenPerOrder,
    /// Records and EC2 are not compared.
    NeverSweeps,
    /// Machines whose claim does not exist are left alone.
    NeverReclaims,
    /// A claim's machines are told by its name and its run.
    OwnsByName,
    /// Heartbeats of machines in the pool do not count.
    IgnoresSilence,
    /// The condition of a write checks state and run, but neither `leaving` nor the number of claims.
    ForgetsLeaving,
    /// The condition of a write does not check the number of claims that a machine has been assigned to.
    ForgetsClaims,
    /// A signal counts for every claim of its run.
    CountsOldSignals,
    /// Machines beyond a claim's count are kept until their threshold.
    KeepsSurplus,
    /// Messages are restored by their number alone.
    RestoresByCount,
    /// A claim takes what there is, and keeps it while it waits for the rest.
    HoldsWhileItWaits,
}
