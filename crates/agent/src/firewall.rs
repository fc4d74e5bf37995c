//! Keeps the runner's user away from the metadata service, and with it from the instance's role. The rule goes with the
//! machine's next boot, and the agent sets it again at each of its starts.

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::{limits, process};

const METADATA_IPV4: &str = "169.254.169.254";
/// Off unless the image or its launch asks for it.
const METADATA_IPV6: &str = "fd00:ec2::254";

/// Refuses the user's packets to the metadata service, with the tool that the image has.
pub async fn keep_away(uid: u32) -> Result<()> {
    let by_iptables = match reject("iptables", METADATA_IPV4, uid).await {
        Ok(()) => {
            if let Err(error) = reject("ip6tables", METADATA_IPV6, uid).await {
                tracing::warn!("the metadata service is not blocked for IPv6, where it is off by default: {error:#}");
            }
            return Ok(());
        }
        Err(error) => error,
    };
    let rule = |address: &str| format!("add rule inet paddock output meta skuid {uid} {address} reject");
    let table = [
        "add table inet paddock".to_owned(),
        "flush table inet paddock".to_owned(),
        "add chain inet paddock output { type filter hook output priority 0 ; }".to_owned(),
        rule(&format!("ip daddr {METADATA_IPV4}")),
        rule(&format!("ip6 daddr {METADATA_IPV6}")),
    ];
    match run("nft", &[&table.join("; ")]).await {
        Ok(()) => Ok(()),
        Err(by_nft) => bail!("neither iptables nor nft could: {by_iptables:#}; {by_nft:#}"),
    }
}

/// Inserts the rule unless it is there.
async fn reject(tool: &str, address: &str, uid: u32) -> Result<()> {
    let uid = uid.to_string();
    let rule = ["-d", address, "-m", "owner", "--uid-owner", &uid, "-j", "REJECT"];
    let with = |verb: &[&'static str]| [&["-w", "5"][..], verb, &rule].concat();
    match run(tool, &with(&["-C", "OUTPUT"])).await {
        Ok(()) => Ok(()),
        Err(_) => run(tool, &with(&["-I", "OUTPUT", "1"])).await,
    }
}

async fn run(tool: &str, args: &[&str]) -> Result<()> {
    let (status, text) = process::output(Command::new(tool).args(args), limits::FIREWALL_TIMEOUT)
        .await
        .with_context(|| tool.to_owned())?;
    if !status.success() {
        bail!("{tool} ended with {status}: {}", crate::words::why(&text));
    }
    Ok(())
}
