//! What agents write: heartbeats and signals. They are read by their keys alone, only those of machines that the operator
//! knows, and whatever a machine has written there.

use std::{collections::HashMap, time::Duration};

use aws_sdk_dynamodb::types::{AttributeValue, KeysAndAttributes};
use futures::future::try_join_all;
use paddock_core::ec2::machine::{AgentReport, HEARTBEATS_PER_READ};
use paddock_record::{Heartbeat, REPORT_ATTRIBUTES, WorkerSignal, attribute as a, entity, is_oversized, report_key};

use super::{AwsError, dynamodb::Records, word};

type Item = HashMap<String, AttributeValue>;

/// Calls that are under way at a time. An answer has up to 16 MB, if machines write as much as DynamoDB takes.
const READS_AT_ONCE: usize = 4;
/// How often a call is repeated for the keys that DynamoDB has left out, for the size of the answer or because it
/// throttles, and the first pause before that, which doubles. A hundred items of 400 KB, the largest, take three answers.
const READ_ROUNDS: u32 = 6;
const UNREAD_BACKOFF: Duration = Duration::from_millis(20);

/// Which records of an agent to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportQuery {
    pub id: String,
    /// Whether to read the heartbeat in addition to the signal.
    pub heartbeat: bool,
}

/// What was read of one agent. What it has not written is missing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadReport {
    pub report: AgentReport,
    pub fault: Option<ReportFault>,
}

/// What no agent writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReportFault {
    Unreadable(String),
    /// Its texts were cut.
    Oversized,
}

/// What was read, by instance. An instance that is missing was not read.
pub type Reports = HashMap<String, ReadReport>;

impl Records {
    /// The reports of the agents in `queries`.
    pub async fn report(&self, queries: &[ReportQuery]) -> Result<Reports, AwsError> {
        let arns = self.arns()?;
        let signals = queries.iter().map(|query| report_key(entity::SIGNAL, arns, &query.id));
        let heartbeats = queries.iter().filter(|query| query.heartbeat);
        let heartbeats = heartbeats.map(|query| report_key(entity::HEARTBEAT, arns, &query.id));
        self.read_reports(signals.chain(heartbeats).collect(), true).await
    }

    /// The heartbeats of these agents. One that is missed is read the next time.
    pub async fn heartbeats(&self, ids: &[String]) -> Result<Reports, AwsError> {
        let arns = self.arns()?;
        self.read_reports(ids.iter().map(|id| report_key(entity::HEARTBEAT, arns, id)).collect(), false).await
    }

    /// Deletes the report of an agent. It may write once more, until its machine is off.
    pub async fn forget_report(&self, id: &str) -> Result<(), AwsError> {
        let arns = self.arns()?;
        for entity in [entity::HEARTBEAT, entity::SIGNAL] {
            self.delete(report_key(entity, arns, id)).await?;
        }
        Ok(())
    }

    async fn read_reports(&self, keys: Vec<Item>, consistent: bool) -> Result<Reports, AwsError> {
        let (mut reports, mut unread) = (Reports::new(), Vec::new());
        for group in keys.chunks(HEARTBEATS_PER_READ * READS_AT_ONCE) {
            let batches = group.chunks(HEARTBEATS_PER_READ).map(|keys| self.read_batch(keys, consistent));
            for (read, missed) in try_join_all(batches).await? {
                for (id, read) in read {
                    merge(reports.entry(id).or_default(), read);
                }
                unread.extend(missed);
            }
        }
        // Half of a report would look as if the other half had never been written.
        unread.iter().for_each(|id| drop(reports.remove(id)));
        Ok(reports)
    }

    /// Reads up to [`HEARTBEATS_PER_READ`] keys; also returns the instances of those that were not read.
    async fn read_batch(&self, keys: &[Item], consistent: bool) -> Result<(Reports, Vec<String>), AwsError> {
        let names: Vec<_> = REPORT_ATTRIBUTES.iter().map(|name| format!("#{name}")).collect();
        let wanted = KeysAndAttributes::builder()
            .set_keys(Some(keys.to_vec()))
            .consistent_read(consistent)
            .projection_expression(names.join(", "))
            .set_expression_attribute_names(Some(
                names.iter().cloned().zip(REPORT_ATTRIBUTES.map(str::to_owned)).collect(),
            ));
        let mut wanted = wanted.build().ok();
        let mut reports: Reports = keys.iter().map(|key| (id_of(key), ReadReport::default())).collect();
        let mut round = 0;
        while let Some(keys) = wanted.take() {
            if round > 0 {
                tokio::time::sleep(UNREAD_BACKOFF * 2_u32.pow(round - 1)).await;
            }
            round += 1;
            let read = self.client.batch_get_item().request_items(&self.table, keys);
            let answer = read.send().await.map_err(word("BatchGetItem"))?;
            for item in answer.responses.unwrap_or_default().remove(&self.table).unwrap_or_default() {
                merge(reports.entry(id_of(&item)).or_default(), parse(&item));
            }
            wanted = answer.unprocessed_keys.unwrap_or_default().remove(&self.table);
            if round == READ_ROUNDS {
                break;
            }
        }
        let unread: Vec<_> = wanted.iter().flat_map(|left| left.keys()).map(id_of).collect();
        if unread.len() == keys.len() {
            let message = format!("none of {} items was read in {READ_ROUNDS} calls", keys.len());
            return Err(AwsError::Throttled { call: "BatchGetItem", message });
        }
        Ok((reports, unread))
    }
}

fn merge(report: &mut ReadReport, more: ReadReport) {
    report.report.heartbeat = report.report.heartbeat.take().or(more.report.heartbeat);
    report.report.signal = report.report.signal.take().or(more.report.signal);
    // Of two, the one that ends the reading counts.
    if more.fault == Some(ReportFault::Oversized) || report.fault.is_none() {
        report.fault = more.fault.or(report.fault.take());
    }
}

fn parse(item: &Item) -> ReadReport {
    let partition = item.get(a::PK).and_then(|pk| pk.as_s().ok()).map_or("", String::as_str);
    let report = match partition.starts_with(&format!("TYPE#{}#", entity::HEARTBEAT)) {
        true => Heartbeat::from_item(item).map(|beat| AgentReport { heartbeat: Some(beat), signal: None }),
        false => WorkerSignal::from_item(item).map(|signal| AgentReport { heartbeat: None, signal: Some(signal) }),
    };
    let (report, fault) = match report {
        Ok(report) => (report, None),
        Err(error) => (AgentReport::default(), Some(ReportFault::Unreadable(error.to_string()))),
    };
    ReadReport { report, fault: if is_oversized(item) { Some(ReportFault::Oversized) } else { fault } }
}

/// The instance of a key or an item.
fn id_of(item: &Item) -> String {
    let sort_key = item.get(a::SK).and_then(|sk| sk.as_s().ok()).map_or("", String::as_str);
    sort_key.strip_prefix("ID#").unwrap_or(sort_key).to_owned()
}

#[cfg(test)]
#[path = "reports_tests.rs"]
mod tests;
