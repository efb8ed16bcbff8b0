"""What all HTTP interfaces share: access, bodies, images, submissions, problems."""
