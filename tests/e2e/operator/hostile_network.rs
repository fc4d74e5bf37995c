//! Clients of the open port that mean no good.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use paddock_bed::{github::signature, stage::WEBHOOK_SECRET};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::fixture::{webhook::WebhookPool, world::World};

const SILENT_CLIENTS: usize = 1000;
const DELIVERIES: u64 = 10;
/// Less than the time for which a body is waited for, and half of what GitHub waits for an answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// I9: a thousand clients announce bodies and do not send them; deliveries are answered nevertheless.
pub async fn i9_clients_that_send_nothing_delay_no_delivery(world: &World) -> Result<()> {
    let pool = WebhookPool::new(world).await?;
    let client = reqwest::Client::builder().timeout(ANSWER_DEADLINE).build()?;
    let answered = async || {
        let silent = try_join_all((0..SILENT_CLIENTS).map(|number| silent_client(world, number))).await;
        for job in 0..DELIVERIES {
            let body = pool.body(930_000 + job, "queued").to_string();
            let delivery = client
                .post(format!("{}/webhook", world.url()))
                .header("content-type", "application/json")
                .header("x-github-event", "workflow_job")
                .header("x-hub-signature-256", signature(WEBHOOK_SECRET, body.as_bytes()));
            if !delivery.body(body).send().await.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(false);
            }
        }
        // They were there all the time; the operator may have closed some of them.
        Ok(silent.is_ok())
    };
    world.until_true("each delivery is answered in time beside the silent clients", answered).await?;
    let claims = pool.claims().await?;
    let made = |job| claims.contains_key(&format!("job-{}", 930_000 + job));
    ensure!((0..DELIVERIES).all(made), "{:?}", claims.keys());
    Ok(())
}

/// Announces the longest body that is accepted. Some send a part of it.
async fn silent_client(world: &World, number: usize) -> Result<TcpStream> {
    let address = world.url();
    let address = address.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.context("cannot connect")?;
    let head = format!(
        "POST /webhook HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nX-GitHub-Event: workflow_job\r\n\
         X-Hub-Signature-256: {}\r\nContent-Length: {}\r\n\r\n",
        signature("guessed", b""),
        4 << 20
    );
    // The operator may have closed it already.
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(&vec![b' '; (number % 4) << 14]).await;
    Ok(stream)
}
