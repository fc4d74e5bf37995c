//! The EC2 instance metadata service (IMDSv2).

use anyhow::{Context, Result};
use aws_config::imds::{self, client::error::ImdsError};
use paddock_record::MachineArns;
use serde::Deserialize;

use crate::limits::backoff;

#[derive(Clone)]
pub struct Metadata(imds::Client);

/// Which instance this is.
#[derive(Debug, PartialEq, Eq)]
pub struct Identity {
    pub instance_id: String,
    pub arns: MachineArns,
}

/// The part of the instance identity document that the agent needs.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    instance_id: String,
    region: String,
    account_id: String,
}

impl Metadata {
    pub fn new() -> Self {
        Self(imds::Client::builder().build())
    }

    /// Retries until it succeeds: without its identity the agent can do nothing.
    pub async fn identity(&self) -> Identity {
        let mut failures = 0;
        loop {
            match self.read_identity().await {
                Ok(identity) => return identity,
                Err(error) => {
                    tracing::warn!("cannot read the instance's identity from the metadata service; retrying: {error:#}")
                }
            }
            failures += 1;
            tokio::time::sleep(backoff(failures)).await;
        }
    }

    async fn read_identity(&self) -> Result<Identity> {
        let document = self.0.get("/latest/dynamic/instance-identity/document").await?;
        let document: Document = serde_json::from_str(document.as_ref()).context("the identity document")?;
        let partition = self.0.get("/latest/meta-data/services/partition").await?.into();
        let Document { instance_id, region, account_id: account } = document;
        Ok(Identity { instance_id, arns: MachineArns { partition, region, account } })
    }

    /// The spot interruption notice, if there is one. An unreachable service counts as no notice.
    pub async fn spot_interruption(&self) -> Option<String> {
        match self.0.get("/latest/meta-data/spot/instance-action").await {
            Ok(notice) => Some(notice.into()),
            Err(ImdsError::ErrorResponse(_)) => None,
            Err(error) => {
                tracing::debug!(%error, "metadata service unreachable");
                None
            }
        }
    }
}
