//! What EC2 tells this instance about itself (IMDSv2).

use aws_config::imds::{self, client::error::ImdsError};

use crate::limits::pause;

#[derive(Clone)]
pub struct Metadata(imds::Client);

impl Metadata {
    pub fn new() -> Self {
        Self(imds::Client::builder().build())
    }

    /// Asks for as long as it takes: an instance that does not know its own name can do nothing else.
    pub async fn instance_id(&self) -> String {
        let mut failures = 0;
        loop {
            match self.0.get("/latest/meta-data/instance-id").await {
                Ok(id) => return id.into(),
                Err(error) => {
                    tracing::warn!(%error, "the metadata service does not tell the instance id; asking again")
                }
            }
            failures += 1;
            tokio::time::sleep(pause(failures)).await;
        }
    }

    /// The announcement that EC2 takes a spot instance back, once there is one. A service that does not answer has
    /// announced nothing.
    pub async fn spot_interruption(&self) -> Option<String> {
        match self.0.get("/latest/meta-data/spot/instance-action").await {
            Ok(notice) => Some(notice.into()),
            Err(ImdsError::ErrorResponse(_)) => None,
            Err(error) => {
                tracing::debug!(%error, "the metadata service does not answer");
                None
            }
        }
    }
}
