//! The EC2 instance metadata service (IMDSv2).

use aws_config::imds::{self, client::error::ImdsError};

use crate::limits::backoff;

#[derive(Clone)]
pub struct Metadata(imds::Client);

impl Metadata {
    pub fn new() -> Self {
        Self(imds::Client::builder().build())
    }

    /// Retries until it succeeds: without its id the agent can do nothing.
    pub async fn instance_id(&self) -> String {
        let mut failures = 0;
        loop {
            match self.0.get("/latest/meta-data/instance-id").await {
                Ok(id) => return id.into(),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the instance id from the metadata service; retrying")
                }
            }
            failures += 1;
            tokio::time::sleep(backoff(failures)).await;
        }
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
