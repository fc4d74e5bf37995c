//! The primary keys of the table.
//!
//! What a machine writes has a partition of its own, named by the instance's ARN: IAM sees the partition key and the ARN
//! of the caller, and nothing else of an item. So a machine's policy can grant its own items alone (`docs/iam`).

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;

use crate::{attribute as a, entity};

type Item = HashMap<String, AttributeValue>;

/// Where the machines of a cluster are, as their ARNs name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineArns {
    /// `aws`, or another one such as `aws-cn`.
    pub partition: String,
    pub region: String,
    pub account: String,
}

impl MachineArns {
    /// The place of the table, which is the machines' own: the operator creates both.
    pub fn of_table(arn: &str) -> Option<Self> {
        match arn.splitn(6, ':').collect::<Vec<_>>()[..] {
            ["arn", partition, "dynamodb", region, account, _] if ![partition, region, account].contains(&"") => {
                Some(Self { partition: partition.into(), region: region.into(), account: account.into() })
            }
            _ => None,
        }
    }

    /// The ARN of an instance.
    pub fn arn(&self, id: &str) -> String {
        let Self { partition, region, account } = self;
        format!("arn:{partition}:ec2:{region}:{account}:instance/{id}")
    }
}

/// The key of the operator's record of an instance.
pub fn instance_key(id: &str) -> Item {
    key(entity::INSTANCE.to_owned(), id)
}

/// The key of what the agent of an instance writes: its heartbeat or its signal.
pub fn report_key(entity: &str, arns: &MachineArns, id: &str) -> Item {
    key(format!("{entity}#{}", arns.arn(id)), id)
}

fn key(partition: String, id: &str) -> Item {
    Item::from([
        (a::PK.into(), AttributeValue::S(format!("TYPE#{partition}"))),
        (a::SK.into(), AttributeValue::S(format!("ID#{id}"))),
    ])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn arns() -> MachineArns {
        MachineArns { partition: "aws".into(), region: "us-east-1".into(), account: "123456789012".into() }
    }

    #[test]
    fn what_a_machine_writes_is_in_a_partition_with_its_arn() {
        let text = |key: Item, name: &str| key[name].as_s().unwrap().clone();
        let beat = report_key(entity::HEARTBEAT, &arns(), "i-1");
        assert_eq!(text(beat.clone(), a::PK), "TYPE#Heartbeat#arn:aws:ec2:us-east-1:123456789012:instance/i-1");
        assert_eq!(text(beat, a::SK), "ID#i-1");
        assert_eq!(text(instance_key("i-1"), a::PK), "TYPE#INSTANCE");
    }

    #[test]
    fn the_table_tells_where_the_machines_are() {
        let of = MachineArns::of_table;
        assert_eq!(of("arn:aws:dynamodb:us-east-1:123456789012:table/paddock-ci"), Some(arns()));
        let china = of("arn:aws-cn:dynamodb:cn-north-1:1:table/a:b").unwrap();
        assert_eq!(china.arn("i-1"), "arn:aws-cn:ec2:cn-north-1:1:instance/i-1");
        for none in ["", "table", "arn:aws:s3:::bucket", "arn:aws:dynamodb::1:table/t", "arn:aws:dynamodb:us-east-1"] {
            assert_eq!(of(none), None, "{none}");
        }
    }
}
