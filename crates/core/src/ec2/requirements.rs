//! What a claim asks of a machine.

use paddock_record::{IdleMessage, Instance};

use super::reuse_scope;
use crate::api::{Ec2Pool, LaunchOrder, ResourceClass, RunnerClaimSpec, UsageClass};

/// What a claim asks of a machine, the pool's defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirements {
    pub usage_class: UsageClass,
    pub resource_class: String,
    pub cpu: u32,
    pub memory_mib: u32,
    pub allowed_instance_types: Vec<String>,
    /// Whose machines will do; empty: any.
    pub scope: String,
}

impl Requirements {
    /// None if the claim, which is in this namespace, names a resource class that the pool does not have.
    pub fn of(claim: &RunnerClaimSpec, namespace: &str, pool: &Ec2Pool) -> Option<Self> {
        let class = match &claim.resource_class {
            Some(name) => pool.resource_class(name),
            None => pool.default_resource_class(),
        }?;
        Some(Self {
            usage_class: claim.usage_class.unwrap_or(pool.defaults.usage_class),
            resource_class: class.name.clone(),
            cpu: claim.cpu.unwrap_or(0).max(class.cpu),
            memory_mib: claim.memory_mib.unwrap_or(0).max(class.memory_mib),
            allowed_instance_types: claim
                .allowed_instance_types
                .clone()
                .unwrap_or_else(|| pool.defaults.allowed_instance_types.clone()),
            scope: reuse_scope::of_claim(claim, namespace, pool.reuse.scope),
        })
    }

    /// Of machines of this class, with the pool's defaults.
    pub fn of_class(pool: &Ec2Pool, class: &ResourceClass) -> Self {
        Self {
            usage_class: pool.defaults.usage_class,
            resource_class: class.name.clone(),
            cpu: class.cpu,
            memory_mib: class.memory_mib,
            allowed_instance_types: pool.defaults.allowed_instance_types.clone(),
            scope: String::new(),
        }
    }

    /// Of the machines of an order, for any claim.
    pub fn of_order(order: &LaunchOrder) -> Self {
        Self {
            usage_class: order.usage_class,
            resource_class: order.resource_class.clone(),
            cpu: order.cpu,
            memory_mib: order.memory_mib,
            allowed_instance_types: order.allowed_instance_types.clone(),
            scope: String::new(),
        }
    }

    /// Why nothing can be launched where no instance type meets the requirements.
    pub fn no_instance_type(&self) -> String {
        let Self { resource_class, cpu, memory_mib, allowed_instance_types, .. } = self;
        let types = allowed_instance_types.join(", ");
        format!(
            "EC2 has no instance type for the image's architecture with at least {cpu} vCPUs and {memory_mib} MiB \
             (resource class {resource_class}) among {types}: change resourceClasses or allowedInstanceTypes"
        )
    }

    pub fn met_by(&self, message: &IdleMessage) -> bool {
        let IdleMessage { usage_class, resource_class, instance_type, cpu, mem, scope, .. } = message;
        self.fit(usage_class, resource_class, instance_type, *cpu, *mem) && reuse_scope::fits(scope, &self.scope)
    }

    pub fn met_by_record(&self, record: &Instance) -> bool {
        let Instance { usage_class, resource_class, instance_type, cpu, mem, .. } = record;
        self.fit(usage_class, resource_class, instance_type, *cpu, *mem) && self.fits_scope(record)
    }

    /// Whether the claim may have the machine where only `reuse.scope` is asked.
    pub fn fits_scope(&self, record: &Instance) -> bool {
        reuse_scope::fits(reuse_scope::of_machine(record), &self.scope)
    }

    fn fit(&self, usage_class: &str, resource_class: &str, instance_type: &str, cpu: u32, memory_mib: u32) -> bool {
        usage_class == self.usage_class.as_str()
            && resource_class == self.resource_class
            && cpu >= self.cpu
            && memory_mib >= self.memory_mib
            && self.allowed_instance_types.iter().any(|pattern| glob(pattern, instance_type))
    }
}

/// Whether `text` fits `pattern`, in which `*` stands for any text.
pub(super) fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let mut last = None;
    for part in parts {
        if let Some(middle) = last.replace(part) {
            match rest.split_once(middle) {
                Some((_, after)) => rest = after,
                None => return false,
            }
        }
    }
    last.map_or(rest.is_empty(), |end| rest.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> IdleMessage {
        IdleMessage {
            instance_id: "i-1".into(),
            usage_class: "on-demand".into(),
            instance_type: "c6i.large".into(),
            cpu: 2,
            mem: 4096,
            resource_class: "medium".into(),
            scope: String::new(),
            threshold: "2030-01-01T00:00:00Z".into(),
        }
    }

    fn needs(types: &str) -> Requirements {
        Requirements {
            usage_class: UsageClass::OnDemand,
            resource_class: "medium".into(),
            cpu: 2,
            memory_mib: 4096,
            allowed_instance_types: vec![types.into()],
            scope: "repository:acme/a".into(),
        }
    }

    #[test]
    fn globs_match_as_create_fleet_reads_them() {
        for (pattern, text, fits) in [
            ("*", "c6i.large", true),
            ("c*", "c6i.large", true),
            ("c6i.large", "c6i.large", true),
            ("c6i.large", "c6i.xlarge", false),
            ("*.large", "c6i.large", true),
            ("c*i.*large", "c6i.2xlarge", true),
            ("m*", "c6i.large", false),
            ("c*c", "c", false),
            ("*6*6*", "c6i", false),
            ("", "c6i", false),
        ] {
            assert_eq!(glob(pattern, text), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn every_need_is_checked() {
        let good = message();
        assert!(needs("c*").met_by(&good));
        assert!(!needs("m*").met_by(&good));
        assert!(!needs("c*").met_by(&IdleMessage { usage_class: "spot".into(), ..good.clone() }));
        assert!(!needs("c*").met_by(&IdleMessage { resource_class: "large".into(), ..good.clone() }));
        assert!(!needs("c*").met_by(&IdleMessage { cpu: 1, ..good.clone() }));
        assert!(!needs("c*").met_by(&IdleMessage { mem: 4095, ..good.clone() }));
        assert!(!needs("c*").met_by(&IdleMessage { scope: "repository:acme/b".into(), ..good.clone() }));
        assert!(needs("c*").met_by(&IdleMessage { scope: "repository:acme/a".into(), ..good }));
    }
}
