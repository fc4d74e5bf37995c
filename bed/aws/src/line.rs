//! Connections that a handler can close or reset, to simulate a lost response. HTTP servers do not expose this to
//! handlers.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll},
};

use axum::{extract::connect_info::Connected, serve::IncomingStream, serve::Listener};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};

const CLOSED: u8 = 1;
const RESET: u8 = 2;

/// A handler's reference to its request's connection. Once closed, nothing more is written to it.
#[derive(Clone, Default)]
pub struct Line(Arc<AtomicU8>);

impl Line {
    /// Closes the connection without a response.
    pub fn close(&self) {
        self.0.store(CLOSED, Ordering::Release);
    }

    /// Closes the connection with a TCP reset.
    pub fn reset(&self) {
        self.0.store(RESET, Ordering::Release);
    }
}

pub struct LineListener(pub TcpListener);

pub struct CuttableStream {
    stream: TcpStream,
    line: Line,
}

impl CuttableStream {
    fn check(&self) -> io::Result<()> {
        match self.line.0.load(Ordering::Acquire) {
            0 => return Ok(()),
            RESET => self.stream.set_zero_linger()?,
            _ => {}
        }
        Err(io::ErrorKind::ConnectionAborted.into())
    }
}

impl Listener for LineListener {
    type Io = CuttableStream;
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, ()) {
        let (stream, _) = Listener::accept(&mut self.0).await;
        let _ = stream.set_nodelay(true);
        (CuttableStream { stream, line: Line::default() }, ())
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Connected<IncomingStream<'_, LineListener>> for Line {
    fn connect_info(stream: IncomingStream<'_, LineListener>) -> Self {
        stream.io().line.clone()
    }
}

impl AsyncRead for CuttableStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for CuttableStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
